"""Optimizer state in the form in which `torch.distributed.checkpoint` keeps it for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from comera_rec.rank import unwrapped
from comera_rec.recsys.sharding.collection import divided_like, padded_to
from comera_rec.recsys.sharding.fused_optimizer import is_fused
from data_pipeline.errors import UserError


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as "PARAMETER/KEY" -> tensor, to be saved or loaded by `torch.distributed.checkpoint`.

    Where a table is sharded by rows, processes have different slices of its leading core, and momenta of different slices. The
    optimizer's state dict doesn't say so, and a checkpoint of it would keep one process's momenta for all. Here they are
    DTensors, as the core is in the model's state dict. State of tables that are updated in backward by TorchRec, or by optimizers
    that were applied so, is not included: it is in `model.fused_optimizer.state_dict()`.

    Args:
        model: the sharded model; under `DistributedModelParallel`, its `module`.
        optimizer: an optimizer of its parameters.

    Raises:
        ValueError: for state of a divided core that has neither one number nor the core's shape.

    Example:
        >>> dcp.save({"model": dmp.state_dict(), "optimizer": optimizer_state(dmp.module, optimizer)})  # doctest: +SKIP
    """
    weights, tensors = model.state_dict(), {}
    for name, key, parameter, state in _entries(model, optimizer):
        value, whole = state[key], weights[name]
        if isinstance(whole, DTensor) and isinstance(value, Tensor) and value.numel() > 1:
            if value.shape != parameter.shape:
                raise UserError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}, which can't be divided as the core is: use an optimizer "
                    "whose state has the parameter's shape"
                )
            value = divided_like(value, whole)
        tensors[f"{name}/{key}"] = value
    return tensors


def load_optimizer_state_(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Set an optimizer's state to what `optimizer_state` returned and `torch.distributed.checkpoint.load` has filled.

    The optimizer must have state of the same sizes already: let it take a step first, and give TT modules the saved TT ranks.

    Args:
        model, optimizer: as for `optimizer_state`.
        state: its result.

    Raises:
        ValueError: if `state` lacks an entry, or the optimizer has no state to load it into, as Adam before its first step.
    """
    entries, inner = list(_entries(model, optimizer)), unwrapped(optimizer)
    has_state = any(group.get("momentum") != 0 for group in inner.param_groups)  # not SGD without momentum
    trained = [each for group in inner.param_groups for each in group["params"] if each.requires_grad and not is_fused(each)]
    if not entries and (state or (has_state and trained)):
        raise UserError(
            f"the {type(inner).__name__} has no state yet to load into: let it take a step, load the model, and "
            "then what optimizer_state returns"
        )
    for name, key, parameter, target in entries:
        if f"{name}/{key}" not in state:
            raise UserError(f"the state lacks {key!r} of {name!r}: give what optimizer_state returns for this model and optimizer")
        value = state[f"{name}/{key}"]
        target[key] = padded_to(value, parameter.shape) if isinstance(value, DTensor) else value


def _entries(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str, nn.Parameter, dict[str, Any]]]:
    """Yield name, key, parameter and the parameter's state, for each entry of it."""
    states = unwrapped(optimizer).state
    for name, parameter in model.named_parameters():
        state = {} if is_fused(parameter) else states.get(parameter, {})
        for key in list(state):
            yield name, key, parameter, state
