"""Optimizers that are applied to cores in backward, slice by slice.

There are two ways to ask for it. `apply_optimizer_in_backward`, of torch.distributed.optim or torchrec, gives a parameter an
optimizer of its own, which steps as soon as the parameter's gradient is there. `comera_rec.update_in_backward_` leaves cores with
the optimizer that they have. Where the optimizer is one of those below, the CPU's lookup makes no gradient of cores at all: it
updates the slices that the batch met, with the optimizer's settings and in the optimizer's state. Sums and moments of slices that
it did not meet stay as they are, as those of rows in FBGEMM's tables; with SGD and Adagrad it makes no difference.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class _Kind(NamedTuple):
    number: int  # as the operator counts them
    plain: dict[str, Any]  # settings, and the only values of them that are understood
    states: tuple[str, ...] = ()


_KINDS = {
    "SGD": _Kind(0, {"momentum": 0, "nesterov": False, "maximize": False}),
    "Adagrad": _Kind(1, {"maximize": False, "differentiable": False}, ("sum",)),
    "RowWiseAdagrad": _Kind(2, {"maximize": False}, ("sum",)),
    "Adam": _Kind(3, {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": False},
                  ("exp_avg", "exp_avg_sq")),
}  # fmt: skip
ROW_WISE = "RowWiseAdagrad"
_UPDATING = "_comera_updating"  # on a parameter that an optimizer updates in backward


class _Updating:
    """Which optimizer, and the number of the parameter's group. It stays behind where a parameter is pickled."""

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.pair = optimizer, number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def register_update(core: nn.Parameter, optimizer: Optimizer) -> bool:
    """Let an optimizer that holds a core update it in the backward of its lookups; whether the optimizer is of a kind that can."""
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter is core for parameter in group["params"]) and kind_of(optimizer, number) is not None:
            setattr(core, _UPDATING, _Updating(optimizer, number))
            return True
    return False


class Updates:
    """What changes the cores of a lookup in its backward, and the diagonals between them where they are updated alike.

    Attributes:
        cores: in the lookup's order.
        diagonals: likewise; None if their gradients are asked for.
    """

    def __init__(
        self,
        cores: Sequence[Tensor],
        diagonals: Sequence[Tensor] | None,
        optimizers: Sequence[tuple[Optimizer, int]],
        kind: _Kind,
    ) -> None:
        self.cores = [core.detach() for core in cores]
        self.diagonals = None if diagonals is None else [diagonal.detach() for diagonal in diagonals]
        self._parameters, self._optimizers, self._kind = [*cores, *(diagonals or ())], optimizers, kind

    def begin_step(self) -> tuple[list[Tensor], list[Tensor], int, list[float]]:
        """Count a step; first and second states, the optimizers' kind and settings, of cores and then of diagonals."""
        settings: list[float] = []
        states: tuple[list[Tensor], list[Tensor]] = ([], [])
        of_parameters = [
            optimizer.state[parameter] for parameter, (optimizer, _) in zip(self._parameters, self._optimizers, strict=True)
        ]
        steps = [0] * len(of_parameters)
        if self._kind.states:
            counts = _count(of_parameters)
            if any(_needs_step(optimizer.param_groups[number]) for optimizer, number in set(self._optimizers)):
                steps = [int(count) for count in counts.tolist()]
        known: dict[tuple[Optimizer, int, int], list[float]] = {}  # mostly one for all
        for parameter, state, of_parameter, step in zip(self._parameters, of_parameters, self._optimizers, steps, strict=True):
            key = (*of_parameter, step)
            if key not in known:
                known[key] = _settings(of_parameter[0].param_groups[of_parameter[1]], step)
            settings += known[key]
            for found, name in zip(states, self._kind.states, strict=False):
                found.append(self._state(parameter, state, name, of_parameter))
        return *states, self._kind.number, settings

    def _state(self, parameter: Tensor, state: dict[str, Any], name: str, of_parameter: tuple[Optimizer, int]) -> Tensor:
        kept: Tensor | None = state.get(name)
        if self._kind is _KINDS[ROW_WISE]:
            # Its sums are laid out for matrices when it is made; of a core there is one a slice.
            slices = (parameter.shape[1],) if parameter.dim() == 4 else (1,)
            if kept is not None and kept.shape == slices:
                return kept
            state[name] = torch.full(slices, _initial(of_parameter), dtype=torch.float32, device=parameter.device)
        elif kept is None:
            state[name] = torch.full_like(parameter, _initial(of_parameter), memory_format=torch.preserve_format)
        elif kept.stride() != parameter.stride():  # as from a checkpoint that doesn't keep them
            state[name] = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(kept)
        found: Tensor = state[name]
        return found


def _count(states: Sequence[dict[str, Any]]) -> Tensor:
    """Count a step of each parameter; their counts, [parameters], of which the states hold views: one addition does for all."""
    counts: list[Tensor | None] = [state.get("step") for state in states]
    base = None if counts[0] is None else counts[0]._base
    if base is None or len(base) != len(counts) or any(count is None or count._base is not base for count in counts):
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        base = torch.stack([zero if count is None else count.float() for count in counts])
        for k, state in enumerate(states):
            state["step"] = base[k]
    return base.add_(1)


def _needs_step(group: dict[str, Any]) -> bool:
    return "betas" in group or bool(group.get("lr_decay"))


def _settings(group: dict[str, Any], step: int) -> list[float]:
    """Of a parameter, as the operator takes them."""
    lr, betas, corrections = float(group["lr"]), (0.0, 0.0), [1.0, 1.0]
    if "betas" in group:
        betas = group["betas"]
        corrections = [1 - beta**step for beta in betas]
    elif group.get("lr_decay"):
        lr /= 1 + (step - 1) * group["lr_decay"]
    return [lr, group.get("eps", 0.0), group["weight_decay"], *betas, *corrections]


def _initial(of_parameter: tuple[Optimizer, int]) -> float:
    optimizer, number = of_parameter
    initial: float = optimizer.param_groups[number].get("initial_accumulator_value", 0.0)
    return initial


def find_updates(cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> Updates | None:
    """What changes cores in backward; None where their gradients are asked for, or their optimizers are of another kind.

    Args:
        cores: of all tables of a lookup, as they lie.
        diagonals: between them.

    Raises:
        ValueError: where some of them have an optimizer that only this way of updating can apply, and others none.
    """
    found = [_optimizer_of(core) for core in cores]
    kinds = {optimizer and kind_of(*optimizer) for optimizer in set(found)}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        of_diagonals = [_optimizer_of(diagonal) for diagonal in diagonals]
        if any(optimizer is None or kind_of(*optimizer) != kind for optimizer in set(of_diagonals)):
            of_diagonals = []
        stepping = [optimizer for optimizer in (*found, *of_diagonals) if optimizer is not None]
        return Updates(cores, diagonals if of_diagonals else None, stepping, _KINDS[kind])
    if ROW_WISE in kinds:
        raise ValueError(
            "RowWiseAdagrad in backward must be given to all cores of the tables that are looked up together, or to none"
        )
    return None


def update_kind(core: Tensor) -> str | None:
    """Of which kind the optimizer is that updates a core in backward, slice by slice; None if there is none."""
    found = _optimizer_of(core)
    return kind_of(*found) if found else None


def kind_of(optimizer: Optimizer, number: int) -> str | None:
    """Which of the kinds that are applied slice by slice an optimizer is to one of its groups; None if it is none of them."""
    name, group = type(optimizer).__name__, optimizer.param_groups[number]
    if name not in _KINDS:
        return None
    return name if all(group.get(setting, value) == value for setting, value in _KINDS[name].plain.items()) else None


def _optimizer_of(core: Tensor) -> tuple[Optimizer, int] | None:
    """The only optimizer that is to step in backward, and the number of the core's group.

    DistributedDataParallel takes the hooks away, to step when gradients are averaged: then it needs gradients.
    """
    # Attributes of its own are only on a tensor that somebody gave an optimizer: asking for others takes a while.
    own = core.__dict__
    if not own or not core.requires_grad:
        return None
    optimizers = own.get("_in_backward_optimizers", ())
    if not optimizers:
        updating: _Updating | None = own.get(_UPDATING)
        return None if updating is None else updating.pair
    if len(optimizers) != 1:
        return None
    # Whoever applied an optimizer has imported the module; importing it here would cost everyone a second.
    in_backward = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
    handles = in_backward.param_to_optim_hook_handle_map.get(core, ())
    return (optimizers[0], 0) if any(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles) else None
