"""Programs in the style of public ones: swapped and sharded, they train as without sharding."""

from itertools import product

import pytest
import torch
from foreign_programs import PROGRAMS, SAMPLES, batch
from processes import run
from sharding import shard
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from comera_rec.recsys.sharding.collection import ShardedTTEmbeddingBagCollection

pytestmark = pytest.mark.distributed

STEPS = 50
KINDS = {"user": "row_wise", "item": "table_wise", "place": "data_parallel", "day": "table_wise"}
NAMES = {1: ["dlrm"], 2: [name for name, program in PROGRAMS.items() if program.is_sharded]}  # by number of processes


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything but dense tables, which TorchRec keeps in another form."""
    state = {name: value for name, value in model.state_dict().items() if "dense_bags" not in name}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


def train_sharded(rank: int, name: str) -> list[dict[str, Tensor]]:
    """Return values before the first step and after each."""
    torch.manual_seed(rank)
    program = PROGRAMS[name]
    model = shard(program.model("meta"), KINDS, batch=SAMPLES)
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), program.dense_optimizer)
    optimizer = CombinedOptimizer([model.fused_optimizer, dense]) if program.is_combined else dense
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches, values = iter([batch(step, range(rank, rank + 1)) for step in range(STEPS)]), [values_of(model)]
    for _ in range(STEPS):
        pipeline.progress(batches)
        values.append(values_of(model))
    sharded = [module for module in model.modules() if isinstance(module, ShardedTTEmbeddingBagCollection)]
    assert set(sharded) <= set(pipeline._pipelined_modules)
    return values


def train_unsharded(name: str, world: int, start: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    program = PROGRAMS[name]
    model = program.model("cpu")
    missing, unexpected = model.load_state_dict(start, strict=False)
    assert not unexpected
    assert all("dense_bags" in key for key in missing)
    optimizer = program.dense_optimizer([each for _, each in in_backward_optimizer_filter(model.named_parameters())])
    values = [values_of(model)]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, range(world)))[0].backward()
        optimizer.step()
        values.append(values_of(model))
    return values


@pytest.mark.parametrize("world", NAMES)
def test_every_step_moves_the_tables_as_without_sharding(world: int) -> None:
    for name in NAMES[world]:
        results = run(world, train_sharded, name)
        sharded = [{key: value for values in results for key, value in values[step].items()} for step in range(STEPS + 1)]
        expected = train_unsharded(name, world, sharded[0])
        tables = [key for key in expected[0] if ".tt_bags." in key]
        assert tables
        for step, key in product(range(STEPS), tables):
            movement, wanted = (values[step + 1][key] - values[step][key] for values in (sharded, expected))
            assert wanted.any(), key
            torch.testing.assert_close(movement, wanted, atol=1e-5, rtol=1e-3, msg=f"{name}: {key} in step {step}")
