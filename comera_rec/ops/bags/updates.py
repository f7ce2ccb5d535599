"""Optimizers that are applied to cores in backward, slice by slice.

There are two ways to request this. `apply_optimizer_in_backward`, of torch.distributed.optim or torchrec, gives a parameter a
separate optimizer, which steps as soon as the parameter's gradient is ready. `comera_rec.update_in_backward_` leaves cores with
their present optimizer. If the optimizer is one of those below (on a GPU, if `Updates.gpu_rules` returns some), the lookup forms no
gradients of cores at all: it updates the slices that the batch used, with the optimizer's settings and state. Sums and moments of
other slices stay unchanged, as do those of rows in FBGEMM's tables; for SGD and Adagrad without weight decay this makes no
difference.

Cores of 16 bits, and their sums and moments, are rounded up or down at random such that the mean is exact (stochastic rounding,
Gupta et al., ICML 2015): rounding to the nearest would lose steps below half a unit in the last place. torch's default
generator seeds it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class _Kind(NamedTuple):
    number: int  # the kind's number in the C++ operator
    required: dict[str, Any]  # settings that must have these values
    states: tuple[str, ...] = ()


_KINDS = {
    "SGD": _Kind(0, {"momentum": 0, "nesterov": False, "maximize": False}),
    "Adagrad": _Kind(1, {"maximize": False, "differentiable": False}, ("sum",)),
    "RowWiseAdagrad": _Kind(2, {"maximize": False}, ("sum",)),
    "Adam": _Kind(3, {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": False},
                  ("exp_avg", "exp_avg_sq")),
    "AdamW": _Kind(4, {"amsgrad": False, "maximize": False, "differentiable": False}, ("exp_avg", "exp_avg_sq")),
}  # fmt: skip
ROW_WISE = "RowWiseAdagrad"
_UPDATING = "_comera_updating"  # attribute of a parameter that an optimizer updates in backward


class _Updating:
    """The optimizer that updates a parameter, and the number of the parameter's group; pickled as None."""

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.pair = optimizer, number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def unregister_update(core: nn.Parameter) -> None:
    """Let a core get gradients again."""
    core.__dict__.pop(_UPDATING, None)


def register_update(core: nn.Parameter, optimizer: Optimizer) -> bool:
    """Let an optimizer update a core in the backward of its lookups; return whether it has the core and is of a known kind."""
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter is core for parameter in group["params"]) and kind_of(optimizer, number) is not None:
            setattr(core, _UPDATING, _Updating(optimizer, number))
            return True
    return False


class Updates:
    """Updates of a lookup's cores in backward, and of the diagonals if their optimizers are of the same kind.

    Attributes:
        cores: detached cores, in the lookup's order.
        diagonals: detached diagonals, in the lookup's order; None if they get gradients instead.
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

    def begin_step(self) -> tuple[list[Tensor], list[Tensor], int, list[float], int]:
        """Count a step; return first states, second states, the kind, settings, each of cores and then of diagonals, and a seed."""
        settings: list[float] = []
        states: tuple[list[Tensor], list[Tensor]] = ([], [])
        by_parameter = [
            optimizer.state[parameter] for parameter, (optimizer, _) in zip(self._parameters, self._optimizers, strict=True)
        ]
        steps = [0] * len(by_parameter)
        if self._kind.states:
            counts = _count(by_parameter)
            if any(_needs_step(optimizer.param_groups[number]) for optimizer, number in set(self._optimizers)):
                steps = [int(count) for count in counts.tolist()]
        by_group: dict[tuple[Optimizer, int, int], list[float]] = {}  # usually one entry
        for parameter, state, (optimizer, number), step in zip(
            self._parameters, by_parameter, self._optimizers, steps, strict=True
        ):
            group = optimizer.param_groups[number]
            key = (optimizer, number, step)
            if key not in by_group:
                by_group[key] = _settings(group, step)
            settings += by_group[key]
            for tensors, name in zip(states, self._kind.states, strict=False):
                tensors.append(self._state(parameter, state, name, group.get("initial_accumulator_value", 0.0)))
        is_rounded = any(parameter.dtype != torch.float32 for parameter in self._parameters)
        seed = int(torch.randint(1 << 62, (), device="cpu")) if is_rounded else 0
        return *states, self._kind.number, settings, seed

    def gpu_rules(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the rules of cores and of diagonals, which GPU kernels apply; None if they can't.

        They can if rules don't depend on the step, and are equal for all cores, and for all diagonals. Adam's rule does not
        qualify: moments of slices that a batch doesn't use decay too, so only updating whole cores is exact.

        Raises:
            ValueError: for row-wise Adagrad that kernels can't apply, because its own step doesn't work for cores.
        """
        groups = [optimizer.param_groups[number] for optimizer, number in self._optimizers]
        rules = [tuple(_rule(group).items()) for group in groups]
        core_rules, diagonal_rules = set(rules[: len(self.cores)]), set(rules[len(self.cores) :])
        is_row_wise = self._kind is _KINDS[ROW_WISE]
        are_equal = len(core_rules) == 1 and len(diagonal_rules) <= (0 if is_row_wise else 1)
        is_known = is_row_wise or self._kind in (_KINDS["SGD"], _KINDS["Adagrad"])
        if is_known and are_equal and not any(group.get("lr_decay") for group in groups):
            return dict(core_rules.pop()), dict(diagonal_rules.pop() if diagonal_rules else ())
        if is_row_wise:
            raise ValueError(
                "RowWiseAdagrad in backward on a GPU needs the same settings for all cores that are looked up together, "
                "no lr_decay, and another optimizer for rank parameters: set it up so, or use Adagrad"
            )
        return None

    def begin_gpu_step(self) -> tuple[str, list[Tensor]]:
        """Count a step; return the kind, and first states of cores and then of diagonals."""
        groups = [optimizer.param_groups[number] for optimizer, number in self._optimizers]
        by_parameter = [
            optimizer.state[parameter] for parameter, (optimizer, _) in zip(self._parameters, self._optimizers, strict=True)
        ]
        states: list[Tensor] = []
        if self._kind.states:
            _count(by_parameter)
            states = [
                self._state(parameter, state, self._kind.states[0], group.get("initial_accumulator_value", 0.0))
                for parameter, state, group in zip(self._parameters, by_parameter, groups, strict=True)
            ]
        return next(name for name, kind in _KINDS.items() if kind is self._kind), states

    def _state(self, parameter: Tensor, state: dict[str, Any], name: str, initial: float) -> Tensor:
        """Return the named state tensor, created or converted to the layout that the operator needs."""
        existing: Tensor | None = state.get(name)
        if self._kind is _KINDS[ROW_WISE]:
            # The optimizer makes sums for the rows of a matrix; a core has one for each slice.
            slices = (parameter.shape[1],) if parameter.dim() == 4 else (1,)
            if existing is None or existing.shape != slices:
                state[name] = torch.full(slices, initial, dtype=torch.float32, device=parameter.device)
            elif existing.dtype != torch.float32:  # torch converts what it loads to the dtype of the core
                state[name] = existing.float()
        elif existing is None:
            state[name] = torch.full_like(parameter, initial, memory_format=torch.preserve_format)
        elif existing.shape != parameter.shape:
            raise ValueError(
                f"{name!r} of a core's optimizer has shape {tuple(existing.shape)} where the core has {tuple(parameter.shape)}: "
                "load the optimizer's state dict of these TT ranks too, or build the optimizer after the model is loaded"
            )
        elif existing.stride() != parameter.stride() or existing.dtype != parameter.dtype:
            # Loaded from a checkpoint, which has no strides, or the model was moved to another dtype.
            state[name] = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(existing)
        tensor: Tensor = state[name]
        return tensor


def _count(states: Sequence[dict[str, Any]]) -> Tensor:
    """Count a step of each parameter; return the counts, [parameters]. States hold views of them, so one addition is enough."""
    counts: list[Tensor | None] = [state.get("step") for state in states]
    base = None if counts[0] is None else counts[0]._base
    if base is None or len(base) != len(counts) or any(count is None or count._base is not base for count in counts):
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        base = torch.stack([zero if count is None else count.float() for count in counts])
        for k, state in enumerate(states):
            state["step"] = base[k]
    return base.add_(1)


def _rule(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as GPU kernels take them; a learning rate on the device stays there."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return {"lr": lr if on_device else float(lr), "eps": float(group.get("eps", 0.0)), "weight_decay": float(group["weight_decay"])}


def _needs_step(group: dict[str, Any]) -> bool:
    return "betas" in group or bool(group.get("lr_decay"))


def _settings(group: dict[str, Any], step: int) -> list[float]:
    """Return the settings of a parameter as the operator takes them."""
    lr, betas, corrections = float(group["lr"]), (0.0, 0.0), [1.0, 1.0]
    if "betas" in group:
        betas = group["betas"]
        corrections = [1 - beta**step for beta in betas]
    elif group.get("lr_decay"):
        lr /= 1 + (step - 1) * group["lr_decay"]
    return [lr, group.get("eps", 0.0), group["weight_decay"], *betas, *corrections]


def find_updates(cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> Updates | None:
    """Return the updates of cores in backward; None if the cores get gradients instead.

    Args:
        cores: cores of all tables of a lookup.
        diagonals: the rank parameters between them.

    Raises:
        ValueError: if only some of the cores have row-wise Adagrad in backward, which works only slice by slice.
    """
    core_optimizers = [_optimizer_of(core) for core in cores]
    kinds = {optimizer and kind_of(*optimizer) for optimizer in set(core_optimizers)}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        diagonal_optimizers = [_optimizer_of(diagonal) for diagonal in diagonals]
        if any(optimizer is None or kind_of(*optimizer) != kind for optimizer in set(diagonal_optimizers)) or not all(
            diagonal.is_contiguous() for diagonal in diagonals
        ):
            diagonal_optimizers = []
        optimizers = [optimizer for optimizer in (*core_optimizers, *diagonal_optimizers) if optimizer is not None]
        return Updates(cores, diagonals if diagonal_optimizers else None, optimizers, _KINDS[kind])
    if ROW_WISE in kinds:
        raise ValueError(
            "RowWiseAdagrad in backward must be given to all cores of the tables that are looked up together, or to none"
        )
    return None


def update_kind(core: Tensor) -> str | None:
    """Return the kind of the optimizer that updates a core in backward, slice by slice; None without one, or when compiling."""
    optimizer = None if torch.compiler.is_compiling() else _optimizer_of(core)
    return kind_of(*optimizer) if optimizer else None


def kind_of(optimizer: Optimizer, number: int) -> str | None:
    """Return the kind of an optimizer with the settings of one of its groups; None if it can't be applied slice by slice."""
    cls, group = type(optimizer), optimizer.param_groups[number]
    name = cls.__name__
    if name not in _KINDS or not cls.__module__.startswith(("torch.optim.", "torchrec.optim.")):  # others may step differently
        return None
    return name if all(group.get(setting, value) == value for setting, value in _KINDS[name].required.items()) else None


_AVERAGED: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # ids of parameters, by the module that averages them


def _is_averaged(core: Tensor) -> bool:
    """Return whether this runs in the forward of a DistributedDataParallel that averages the core's gradients."""
    replicas = DistributedDataParallel._get_active_ddp_module()
    if replicas is None:
        return False
    if replicas not in _AVERAGED:
        _AVERAGED[replicas] = {id(parameter) for parameter in replicas._module_parameters}
    return id(core) in _AVERAGED[replicas]


def _optimizer_of(core: Tensor) -> tuple[Optimizer, int] | None:
    """Return the only optimizer that steps in backward, and the number of the core's group; None if there is none.

    None also under DistributedDataParallel, which needs gradients to average: it removes the hooks, and steps afterwards.
    """
    # Reading __dict__ is faster than looking up attributes, and it is empty unless an optimizer was registered.
    attributes = core.__dict__
    if not attributes or not core.requires_grad:
        return None
    optimizers = attributes.get("_in_backward_optimizers", ())
    if not optimizers:
        updating: _Updating | None = attributes.get(_UPDATING)
        return None if updating is None or _is_averaged(core) else updating.pair
    if len(optimizers) != 1:
        return None
    # Imported already, since an optimizer was applied; importing it at the top of this file would take a second.
    in_backward = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
    handles = in_backward.param_to_optim_hook_handle_map.get(core, ())
    return (optimizers[0], 0) if any(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles) else None
