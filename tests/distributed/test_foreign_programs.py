"""Programs in the style of TorchRec's own: swapped and sharded, they move their tables in every step as without sharding."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import comera_rec as cr
from comera_rec.testing import run

with warnings.catch_warnings(action="ignore"):  # about torch.jit, which the module uses
    from torch.distributed.optim import _apply_optimizer_in_backward

pytestmark = pytest.mark.distributed

SAMPLES, STEPS, DIM = 4, 3, 8  # samples of a process
SIZES = {"user": 120, "item": 90, "place": 70, "day": 7}
KINDS = {"user": "row_wise", "item": "table_wise", "place": "data_parallel", "day": "table_wise"}
CONFIG = cr.TableCompression(tt_ranks=2, min_rows=50)  # "day" stays dense


def collection(device: str, *names: str) -> EmbeddingBagCollection:
    # TorchRec draws the values of sharded dense tables anew, so those here are all the same.
    dense = {"weight_init_min": 0.1, "weight_init_max": 0.1}
    sizes = [(name, SIZES[name], dense if name == "day" else {}) for name in names]
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name], **options)
        for name, rows, options in sizes
    ]
    return EmbeddingBagCollection(tables, device=torch.device(device))


class Dlrm:
    """Facebook's DLRM script: every optimizer in one, tables updated in backward."""

    is_combined = True

    @staticmethod
    def model(device: str) -> nn.Module:
        tables = collection(device, *SIZES)
        model = DLRMTrain(DLRM(tables, dense_in_features=3, dense_arch_layer_sizes=[8, DIM], over_arch_layer_sizes=[8, 1]))
        cr.compress_(model, tables=CONFIG)
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.05, "eps": 1e-8})
        return model

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.05)


class TwoTower(nn.Module):
    """TorchRec's retrieval: tables of two collections are updated by row-wise Adagrad, which the dense optimizer doesn't know."""

    is_combined = False

    def __init__(self, device: str) -> None:
        super().__init__()
        self.query, self.candidate = collection(device, "user", "place"), collection(device, "item")
        self.query_proj, self.candidate_proj = nn.Linear(2 * DIM, 4), nn.Linear(DIM, 4)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        query = self.query_proj(self.query(batch.sparse_features).values())
        logits = (query * self.candidate_proj(self.candidate(batch.sparse_features).values())).sum(dim=1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels.float()), logits

    @classmethod
    def model(cls, device: str) -> nn.Module:
        model = cr.compress_(cls(device), tables=CONFIG)
        for tables in (model.query, model.candidate):
            _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
        return model

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)


class Bert4Rec(nn.Module):
    """Sequences whose tables the dense optimizer trains."""

    is_combined = True

    def __init__(self, device: str) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=SIZES["item"], embedding_dim=DIM, feature_names=["item"])
        self.history = EmbeddingCollection([table], device=torch.device(device))
        self.block = nn.TransformerEncoderLayer(DIM, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = self.history(batch.sparse_features)["item"].to_padded_dense(4)
        logits = self.over(self.block(rows).mean(dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels.float()), logits

    @classmethod
    def model(cls, device: str) -> nn.Module:
        return cr.compress_(cls(device), tables=CONFIG)

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)


PROGRAMS: dict[str, Any] = {"dlrm": Dlrm, "two tower": TwoTower, "bert4rec": Bert4Rec}


def batch(step: int, processes: range) -> Batch:
    """The samples of some processes, with bags of 1 to 4 ids."""
    lengths, values, dense, labels = [], [], [], []
    for process_rank in processes:
        generator = torch.Generator().manual_seed(10 * step + process_rank)
        lengths.append(torch.randint(1, 5, (len(SIZES), SAMPLES), generator=generator))
        values.append(
            [
                torch.randint(rows, (int(count),), generator=generator)
                for rows, count in zip(SIZES.values(), lengths[-1].sum(1), strict=True)
            ]
        )
        dense.append(torch.rand(SAMPLES, 3, generator=generator))
        labels.append(torch.randint(2, (SAMPLES,), generator=generator))
    by_feature = [part for feature in zip(*values, strict=True) for part in feature]
    sparse = KeyedJaggedTensor(list(SIZES), torch.cat(by_feature), lengths=torch.cat(lengths, dim=1).flatten())
    return Batch(dense_features=torch.cat(dense), sparse_features=sparse, labels=torch.cat(labels))


def wrapped(model: nn.Module) -> DistributedModelParallel:
    sharders: list[Any] = [
        cr.TTEmbeddingBagCollectionSharder(),
        cr.TTEmbeddingBagCollectionSharder(),
        EmbeddingBagCollectionSharder(),
    ]
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in KINDS.items()}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = cr.TTShardingPlanner(topology, SAMPLES, constraints=constraints).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything but dense tables, which TorchRec keeps in another form."""
    state = {name: value for name, value in model.state_dict().items() if "dense_bags" not in name}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


def train_sharded(rank: int, name: str) -> list[dict[str, Tensor]]:
    """Return values before the first step and after each."""
    torch.manual_seed(rank)
    program = PROGRAMS[name]
    model = wrapped(program.model("meta"))
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), program.dense_optimizer)
    optimizer = CombinedOptimizer([model.fused_optimizer, dense]) if program.is_combined else dense
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches, values = iter([batch(step, range(rank, rank + 1)) for step in range(STEPS)]), [values_of(model)]
    for _ in range(STEPS):
        pipeline.progress(batches)
        values.append(values_of(model))
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


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_step_moves_the_tables_as_without_sharding(name: str, world: int) -> None:
    results = run(world, train_sharded, name)
    sharded = [{key: value for values in results for key, value in values[step].items()} for step in range(STEPS + 1)]
    expected = train_unsharded(name, world, sharded[0])
    tables = [key for key in expected[0] if ".tt_bags." in key]
    assert tables
    for step in range(STEPS):
        for key in tables:
            movement, wanted = (values[step + 1][key] - values[step][key] for values in (sharded, expected))
            assert wanted.any(), key
            torch.testing.assert_close(movement, wanted, atol=1e-5, rtol=1e-3, msg=f"{key} in step {step}")
