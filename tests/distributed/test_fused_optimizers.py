"""Optimizers applied in backward before sharding: TT tables move as unsharded ones do, and TorchRec sees settings and state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from in_backward import _apply_optimizer_in_backward, _get_in_backward_optimizers
from processes import run
from sharding import shard
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

import comera_rec as cr
from comera_rec.rank import truncate_ranks_
from comera_rec.recsys.sharding import optimizer_state, rewrap_data_parallel_

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RowWiseAdagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "TorchRec's SGD": (torchrec.optim.SGD, {"lr": 0.5}),
}
KINDS = ("table_wise", "row_wise", "data_parallel")
# All on the meta device, where values are drawn after sharding; one also on CPU.
CASES = [(kind, "meta", name) for kind in KINDS for name in OPTIMIZERS] + [(kind, "cpu", "RowWiseAdagrad") for kind in KINDS]
CONFIG = cr.TableCompression(tt_ranks=2, min_rows=0)


def table(collection: str, device: str) -> nn.Module:
    """A swapped collection of one table, the same on every process if it has values."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"name": "t", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["f"]}
    if collection == "sequences":
        return cr.compress_(EmbeddingCollection([EmbeddingConfig(**sizes)], device=torch.device(device)), tables=CONFIG)
    return cr.compress_(EmbeddingBagCollection([EmbeddingBagConfig(**sizes)], device=torch.device(device)), tables=CONFIG)


class Model(nn.Module):
    """Rows of ids on each process; the sum over processes is the loss."""

    def __init__(self, collection: str, device: str) -> None:
        super().__init__()
        self.collection = table(collection, device)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.collection(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids) if len(ids) else torch.zeros(1).long()))
        rows: Tensor = found["f"].values() if isinstance(found, dict) else found.values()
        return rows


def ids(process_rank: int, step: int = 0) -> Tensor:
    """Ids of a process: unequal numbers, and in one step none at all."""
    few = [] if step == 1 else [0, 50, 31]
    return torch.tensor([[0, 7, 7, 99], few][process_rank], dtype=torch.int64).add(3 * step) % 100


def rows_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        rows: Tensor = model(torch.arange(100))
        return rows


def train(model: nn.Module, steps: int, processes: list[int]) -> list[Tensor]:
    """Return all rows before the first step and after each."""
    rows, world = [rows_of(model)], dist.get_world_size() if dist.is_initialized() else 1
    for step in range(steps):
        loss = model(torch.cat([ids(process, step) for process in processes])).square().sum()
        (loss * world / 2).backward()  # the mean over processes is half the sum over both
        rows.append(rows_of(model))
    return rows


def train_sharded(rank: int, collection: str) -> list[Any]:
    return [train_with(rank, collection, *case) for case in CASES]


def train_with(
    rank: int, collection: str, kind: str, device: str, optimizer: str
) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """Return the state dict from which training starts, all rows after each step, and those around a step whose rate is zero."""
    model: Any = Model(collection, device)
    torch.manual_seed(rank)
    kind_of_optimizer, settings = OPTIMIZERS[optimizer]
    _apply_optimizer_in_backward(kind_of_optimizer, model.parameters(), settings | ({"lr": 1.0} if device == "cpu" else {}))
    for each in _get_in_backward_optimizers(model) if device == "cpu" else ():  # as a schedule does, before sharding
        each.param_groups[0]["lr"] = settings["lr"]
    model = shard(model, {"t": kind})
    assert not dict(in_backward_optimizer_filter(model.named_parameters())), "no parameter is left to another optimizer"
    start = whole_state(model)
    rows = train(model, 3, [rank])
    groups = model.fused_optimizer.param_groups
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for group in groups:
        group["lr"] = 0.0
    return start, rows, train(model, 1, [rank])


def whole_state(model: nn.Module) -> dict[str, Any]:
    state = copy.deepcopy(model.state_dict())
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


@pytest.mark.parametrize("collection", ["bags", "sequences"])
def test_tables_move_as_unsharded_ones_do(collection: str) -> None:
    for case, *results in zip(CASES, *run(2, train_sharded, collection), strict=True):
        model = Model(collection, "cpu")
        model.load_state_dict({name: value for state, _, _ in results for name, value in state.items()})
        optimizer, settings = OPTIMIZERS[case[2]]
        _apply_optimizer_in_backward(getattr(torch.optim, optimizer.__name__, optimizer), model.parameters(), settings)
        expected = train(model, 3, [0, 1])
        for _, rows, frozen in results:
            for step in range(3):
                torch.testing.assert_close(rows[step + 1], expected[step + 1], atol=1e-5, rtol=1e-4, msg=f"{case} in step {step}")
                assert (rows[step + 1] - rows[step]).abs().max() > 1e-3
            assert torch.equal(*frozen), case


def with_adam(rank: int, kind: str) -> DistributedModelParallel:
    model = Model("bags", "meta")
    torch.manual_seed(rank)
    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.05})
    return shard(model, {"t": kind})


def save(rank: int, folder: str) -> list[list[Tensor]]:
    results = []
    for kind in ("row_wise", "table_wise"):
        model = with_adam(rank, kind)
        train(model, 2, [rank])
        dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=f"{folder}/{kind}")
        results.append(train(model, 1, [rank]))
    return results


def load(rank: int, kinds: tuple[str, str], folder: str) -> list[list[Tensor]]:
    """Load both checkpoints into tables sharded in other ways, and take a step."""
    results = []
    for kind, saved_kind in zip(kinds, ("row_wise", "table_wise"), strict=True):
        model = with_adam(rank + 7, kind)
        state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{saved_kind}")
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])
        results.append(train(model, 1, [rank] if dist.get_world_size() == 2 else [0, 1]))
    return results


def test_state_is_saved_and_loaded_on_any_number_of_processes(tmp_path: Path) -> None:
    expected = run(2, save, str(tmp_path))[0]
    for world, kinds in ((2, ("table_wise", "row_wise")), (1, ("row_wise", "data_parallel"))):
        for results in run(world, load, kinds, str(tmp_path)):
            for found, (before, after) in zip(results, expected, strict=True):
                torch.testing.assert_close(found[0], before, atol=1e-6, rtol=0)
                torch.testing.assert_close(found[1], after, atol=1e-5, rtol=1e-4)


def truncate(rank: int) -> list[Tensor]:
    """Return how the rows of a table move in a step after a truncation, for each sharding type."""
    movements = []
    for kind in KINDS:
        model = with_adam(rank, kind)
        train(model, 1, [rank])
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, cr.TTEmbeddingBag):
                    module.rank_1[1:] = 0.0
        assert not optimizer_state(model.module, model.fused_optimizer)
        truncate_ranks_(model, model.fused_optimizer, threshold=1e-3)
        rewrap_data_parallel_(model)
        before, after = train(model, 1, [rank])
        shapes = {tuple(value["exp_avg"].shape) for value in model.fused_optimizer.state.values()}
        assert shapes == {tuple(getattr(value, "shape", ())) for value in model.state_dict().values()}
        movements.append(after - before)
    return movements


def test_tables_learn_after_their_ranks_were_truncated() -> None:
    for first, second in zip(*run(2, truncate), strict=True):
        assert first.abs().max() > 1e-3
        torch.testing.assert_close(first, second)


def refused(rank: int) -> list[str]:
    messages = []
    for optimizer, settings in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torchrec.optim.LAMB, {"lr": 0.1})):
        model = Model("bags", "meta")
        _apply_optimizer_in_backward(optimizer, model.parameters(), settings)
        with pytest.raises(ValueError, match="sharded TT tables don't support") as error:
            shard(model, {"t": "table_wise"})
        messages.append(str(error.value))
    return messages


def test_optimizers_that_cannot_be_kept_are_refused() -> None:
    ((momentum, lamb),) = run(1, refused)
    assert momentum.startswith("table 't' has SGD with {'lr': 0.1, 'momentum': 0.9} in backward")
    assert "LAMB" in lamb
