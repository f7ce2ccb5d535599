"""Cores updated in backward by their optimizer: the same values as by its step, and no gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward
from processes import run as run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comera_rec as cr
from comera_rec.nn import update_in_backward_

SHAPES = [cr.TTShape((7, 9), (4, 4), (5,)), cr.TTShape((4, 5, 3), (2, 2, 4), (3, 4))]


def two_tables(shape: cr.TTShape) -> nn.ModuleList:
    return nn.ModuleList(cr.TTEmbeddingBag(shape.num_rows, shape.num_cols, shape=shape) for _ in range(2))


def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        ids = torch.randint(model[0].num_embeddings, (40, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        sum((table(ids) * (step + 1)).square().sum() for table in model).backward()
        optimizer.step()


def test_it_learns_the_same_as_the_optimizers_step() -> None:
    """For the formulas of all optimizers, see `tests/ops/test_updates.py`."""
    plain = two_tables(SHAPES[1])
    updated = copy.deepcopy(plain)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.1, eps=1e-8) for model in (plain, updated)]
    assert update_in_backward_(updated, optimizers[1]) == ["0", "1"]
    for model, optimizer in zip((plain, updated), optimizers, strict=True):
        train(model, optimizer)
    for table in updated:
        assert all(core.grad is None for core in table.cores())
        assert all(rank.grad is not None for rank in table.rank_parameters())
    for expected, actual in zip(plain.parameters(), updated.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        for key, value in optimizers[0].state[expected].items():
            torch.testing.assert_close(optimizers[1].state[actual][key], value, rtol=1e-4, atol=1e-6)


def test_row_wise_adagrad_is_the_same_as_applied_in_backward() -> None:
    models = [two_tables(SHAPES[1]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    _apply_optimizer_in_backward(RowWiseAdagrad, models[0].parameters(), {"lr": 0.05})
    optimizer = RowWiseAdagrad(models[1].parameters(), lr=0.05)
    update_in_backward_(models[1], optimizer)
    for model, each in zip(models, (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), optimizer), strict=True):
        train(model, each)
    torch.testing.assert_close(*(list(model.parameters()) for model in models))


class Adagrad(torch.optim.Adagrad):
    """An optimizer of the same name as torch's, but not torch's."""


def test_optimizers_that_cannot_update_in_backward_are_refused() -> None:
    model, optimizers = two_tables(SHAPES[0]), torch.optim
    for kind, tables in (
        (optimizers.RMSprop, model),
        (Adagrad, model),
        (optimizers.Adagrad, nn.ModuleList()),
        (optimizers.Adagrad, two_tables(SHAPES[0])),
    ):
        with pytest.raises(ValueError, match=r"no TT table's cores are updated by this \w+: give the optimizer of the cores"):
            update_in_backward_(tables, kind(model.parameters(), lr=0.1))


def test_it_can_be_undone_and_redone() -> None:
    model = two_tables(SHAPES[0])
    first, second = (torch.optim.Adagrad(model.parameters(), lr=lr) for lr in (0.1, 0.0))
    update_in_backward_(model, first)
    train(model, first, steps=1)
    before = copy.deepcopy(model.state_dict())
    assert update_in_backward_(model, None) == []
    train(model, second, steps=1)
    assert all(core.grad is not None for core in model[0].cores())
    update_in_backward_(model, second)
    train(model, second, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_state_is_converted_with_the_dtype_and_other_ranks_are_refused() -> None:
    model = two_tables(SHAPES[0])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    update_in_backward_(model, optimizer)
    train(model, optimizer, steps=1)
    train(model.bfloat16(), optimizer, steps=1)
    assert optimizer.state[model[0].core_0]["sum"].dtype == torch.bfloat16
    model[0].resize_ranks_([2])
    message = r"'sum' of a core's optimizer has shape \(1, 7, 4, 5\) where the core has \(1, 7, 4, 2\): load the optimizer's state"
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, steps=1)


def train_replicas(rank: int) -> list[torch.Tensor]:
    """Parameters of all processes after some steps, each process with its own ids."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(cr.TTEmbeddingBag(63, 16, shape=SHAPES[0])))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    update_in_backward_(model, optimizer)
    for step in range(3):
        ids = torch.randint(63, (8, 2), generator=torch.Generator().manual_seed(10 * rank + step))
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()
    return [parameter.detach().contiguous() for parameter in model.parameters()]


@pytest.mark.distributed
def test_replicas_stay_equal_under_distributed_data_parallel() -> None:
    first, second = run_processes(2, train_replicas)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
