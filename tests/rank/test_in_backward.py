"""Changing ranks of parameters whose optimizers were applied in backward: state is adapted, and training continues."""

from __future__ import annotations

import pytest
import torch
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward, _get_in_backward_optimizers, param_to_optim_hook_handle_map
from torch import Tensor, nn

import comera_rec as cr
from comera_rec.rank import truncate_ranks_

SHAPE = cr.TTShape((8, 9), (4, 4), (6,))
IDS = torch.arange(72)[:, None]


def make(kind: type, settings: dict, parameters: str = "core") -> nn.Sequential:
    """Build a table and a TT layer whose cores, or all of whose parameters, have separate optimizers."""
    model = nn.Sequential(cr.TTEmbeddingBag(72, 16, shape=SHAPE), cr.TTLinear(16, 12, tt_ranks=4))
    chosen = [p for name, p in model.named_parameters() if parameters in name]
    _apply_optimizer_in_backward(kind, chosen, settings)
    return model


def step(model: nn.Sequential) -> dict[str, Tensor]:
    """Take a step; return the change of every parameter."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(IDS).square().mean().backward()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def cut(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].rank_1[2:] = 0.0
        model[1].rank_2[1:] = 0.0
    truncate_ranks_(model, threshold=1e-3)
    assert (model[0].shape.ranks, model[1].shape.ranks[1]) == ((2,), 1)


# With Adagrad and Adam the lookup updates the table's cores; with momentum hooks on their gradients do, as for the layer's.
every_way = pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.Adagrad, {"lr": 0.05}), (torch.optim.Adam, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})],
)


@every_way
def test_ranks_may_change_without_autograd_and_while_the_last_loss_is_alive(kind: type, settings: dict) -> None:
    model = make(kind, settings)
    loss = model(IDS).square().mean()
    loss.backward()
    with torch.no_grad():
        cut(model)
    changes = step(model)
    assert all(changes[name].abs().sum() > 0 for name in changes if "core" in name)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "core" in name)
    for name, parameter in model.named_parameters():
        assert len(param_to_optim_hook_handle_map.get(parameter, ())) == ("core" in name)
    assert loss.isfinite()
    for optimizer in _get_in_backward_optimizers(model):
        (parameter,) = optimizer.param_groups[0]["params"]
        assert all(value.shape == parameter.shape for value in optimizer.state[parameter].values() if value.numel() > 1)


@every_way
def test_cores_that_are_frozen_while_ranks_change_learn_later(kind: type, settings: dict) -> None:
    model = make(kind, settings)
    step(model)
    for module in model:
        module.core_0.requires_grad_(False)
    cut(model)
    assert not model[0].core_0.requires_grad
    for module in model:
        module.core_0.requires_grad_(True)
    changes = step(model)
    assert all(changes[name].abs().sum() > 0 for name in changes if "core" in name)


def test_removed_hooks_stay_removed() -> None:
    model = make(torch.optim.Adagrad, {"lr": 0.05})
    for core in model[0].cores():  # as DistributedDataParallel does, to step after averaging gradients
        for handle in param_to_optim_hook_handle_map[core]:
            handle.remove()
    cut(model)
    changes = step(model)
    assert {name: bool(changes[name].any()) for name in ("0.core_0", "1.core_0")} == {"0.core_0": False, "1.core_0": True}
    assert model[0].core_0.grad is not None
    model.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, [model[0].core_0], {"lr": 0.1})
    assert step(model)["0.core_0"].any(), "a hook that comes later is not put where the old size was"


def test_a_state_dict_of_other_ranks_keeps_the_hooks() -> None:
    model, saved = (make(torch.optim.SGD, {"lr": 0.1}) for _ in range(2))
    cut(saved)
    model.load_state_dict(saved.state_dict())
    changes = step(model)
    assert all(changes[name].abs().sum() > 0 for name in changes if "core" in name)


@pytest.mark.parametrize("is_used", [False, True])
def test_row_wise_sums_stay_as_they_are(is_used: bool) -> None:
    """Row-wise Adagrad creates its sums for matrices when it is built; cores need others, which the first step creates."""
    model = nn.Sequential(cr.TTEmbeddingBag(72, 16, shape=SHAPE))
    _apply_optimizer_in_backward(RowWiseAdagrad, model[0].cores(), {"lr": 0.05})
    states = [optimizer.state[core] for optimizer, core in zip(_get_in_backward_optimizers(model), model[0].cores(), strict=True)]
    if is_used:
        step(model)
    sums = [state["sum"].clone() for state in states]
    with torch.no_grad():
        model[0].rank_1[2:] = 0.0
    truncate_ranks_(model, threshold=1e-3)
    assert not is_used or all(torch.equal(state["sum"], before) for state, before in zip(states, sums, strict=True))
    assert all(step(model)[name].abs().sum() > 0 for name in ("0.core_0", "0.core_1"))
