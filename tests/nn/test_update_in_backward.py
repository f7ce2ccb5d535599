"""Cores updated in backward by their optimizer: the same values as by its step, and no gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comera_rec as cr
from comera_rec.nn import update_in_backward_
from comera_rec.testing import run as run_processes

SHAPES = [
    cr.TTShape((7, 9), (4, 4), (5,)),
    cr.TTShape((4, 5, 3), (2, 2, 4), (3, 4)),
    cr.TTShape((3, 4, 2, 3), (2, 2, 2, 2), (2, 3, 2)),
]


def two_tables(shape: cr.TTShape) -> nn.ModuleList:
    return nn.ModuleList(cr.TTEmbeddingBag(shape.num_rows, shape.num_cols, shape=shape) for _ in range(2))


def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        ids = torch.randint(model[0].num_embeddings, (40, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        sum((table(ids) * (step + 1)).square().sum() for table in model).backward()
        optimizer.step()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"order{shape.order}")
@pytest.mark.parametrize(
    ("kind", "settings"), [(torch.optim.SGD, {"lr": 1e-5}), (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-8})]
)
def test_it_learns_the_same_as_the_optimizers_step(kind: type, settings: dict, shape: cr.TTShape) -> None:
    plain = two_tables(shape)
    updated = copy.deepcopy(plain)
    optimizers = [kind(model.parameters(), **settings) for model in (plain, updated)]
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


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: f"order{shape.order}")
@pytest.mark.parametrize("how", ["apply", "update"])
def test_row_wise_adagrad_takes_all_parameters(how: str, shape: cr.TTShape) -> None:
    model = two_tables(shape)
    optimizer: torch.optim.Optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    if how == "apply":
        _apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.05})
    else:
        optimizer = RowWiseAdagrad(model.parameters(), lr=0.05)
        update_in_backward_(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, steps=1)
    for name, parameter in model.named_parameters():
        change = parameter.detach() - before[name]
        slices = change.transpose(0, 1) if change.dim() == 4 else change  # each moves as far as the first step allows
        moved = slices.flatten(1).square().mean(1).sqrt()
        assert moved.any(), name
        torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.05))


@pytest.mark.parametrize("case", ["momentum", "others", "no tables"])
def test_optimizers_that_cannot_update_in_backward_are_refused(case: str) -> None:
    model = two_tables(SHAPES[0])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case == "others":
        optimizer = torch.optim.Adagrad(two_tables(SHAPES[0]).parameters())
    with pytest.raises(ValueError, match=r"no TT table's cores are updated by this \w+: give the optimizer of the cores"):
        update_in_backward_(nn.ModuleList() if case == "no tables" else model, optimizer)


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


def test_an_optimizer_of_the_same_name_is_not_torchs() -> None:
    class Adagrad(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> None:
            """Do nothing."""

    bag = cr.TTEmbeddingBag(1000, 8, tt_ranks=2)
    with pytest.raises(ValueError, match="no TT table's cores are updated by this Adagrad: give"):
        update_in_backward_(bag, Adagrad(bag.parameters(), lr=0.1))
