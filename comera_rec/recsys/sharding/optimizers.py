"""Optimizers of sharded tables.

Those applied in backward before sharding are kept for the parameters of shards, and shown to TorchRec as a fused optimizer. The
state of others has the form in which `torch.distributed.checkpoint` keeps it for any number of processes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec.optim
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingType
from torchrec.optim.fused import FusedOptimizer

from comera_rec.nn import TTEmbeddingBag
from comera_rec.ops.bags.updates import can_round, init_state_, kind_of, register_update, step_
from comera_rec.rank import unwrapped
from data_pipeline.errors import UserError

OptimizerBuilders = Mapping[str, Callable[[nn.Parameter], Optimizer]]
"""By the name of a table's parameter: what builds its optimizer for a shard of the parameter."""
_PLACEHOLDERS: dict[type[Optimizer], type[Optimizer]] = {  # TorchRec's have no step: they name kernels of FBGEMM
    torchrec.optim.SGD: torch.optim.SGD,
    torchrec.optim.Adagrad: torch.optim.Adagrad,
    torchrec.optim.Adam: torch.optim.Adam,
}


class FusedTTOptimizer(FusedOptimizer):
    """The optimizers that update the parameters of TT tables in backward; its param groups are theirs.

    Args:
        parameters: parameters with such an optimizer, by name.
        shown: (parameter, state tensor) -> the tensor that state dicts show, with the same memory.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shown: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        optimizers = [optimizer_of(parameter) for parameter in parameters.values()]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(dict(parameters), _States(list(parameters.values()), shown), groups)

    def step(self, closure: Any = None) -> None:
        """Drop gradients, such as those that TorchRec's `init_state` steps by: parameters were updated in backward."""
        for parameter in self.params.values():
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: parameters have no gradients after backward."""


class _States(Mapping[nn.Parameter, dict[str, Any]]):
    """The present optimizer state of parameters, as state dicts show it."""

    def __init__(self, parameters: list[nn.Parameter], shown: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        self._parameters, self._shown = parameters, shown

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not is_fused(parameter):
            raise KeyError(parameter)
        state = optimizer_of(parameter).state[parameter]
        return {key: self._shown(parameter, value) for key, value in state.items()}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._parameters if optimizer_of(parameter).state[parameter])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def optimizer_of(parameter: nn.Parameter) -> Optimizer:
    """Return the optimizer that was applied in backward to a parameter."""
    (optimizer,) = parameter._in_backward_optimizers  # type: ignore[attr-defined]
    assert isinstance(optimizer, Optimizer)
    return optimizer


def is_fused(parameter: Tensor) -> bool:
    """Return whether an optimizer was applied in backward to a parameter."""
    return hasattr(parameter, "_in_backward_optimizers")


def new_optimizers(bag: TTEmbeddingBag) -> OptimizerBuilders:
    """Return what builds, for each parameter with an optimizer in backward, the same optimizer for a shard of the parameter.

    Raises:
        ValueError: for several optimizers of one parameter, or one that can't be kept.
    """
    return {name: _builder(bag.name, parameter) for name, parameter in bag.named_parameters() if is_fused(parameter)}


def _builder(table: str, parameter: nn.Parameter) -> Callable[[nn.Parameter], Optimizer]:
    old: list[Optimizer] = parameter._in_backward_optimizers  # type: ignore[attr-defined]
    kinds: list[type[Optimizer]] = parameter._optimizer_classes  # type: ignore[attr-defined]
    if len(old) != 1:
        raise UserError(f"{table} has {len(old)} optimizers in backward for a parameter: apply one")
    kind = _PLACEHOLDERS.get(kinds[0], kinds[0])
    # TorchRec, which shards the dense tables of the same call, puts the kind of its kernel among its settings.
    settings = {key: value for key, value in parameter._optimizer_kwargs[0].items() if key != "optimizer"}  # type: ignore[attr-defined]
    present = {key: value for group in getattr(old[0], "param_groups", ()) for key, value in group.items() if key != "params"}

    def build(shard: nn.Parameter) -> Optimizer:
        optimizer = kind([shard], **settings)
        optimizer.param_groups[0].update(present)
        return optimizer

    try:
        is_known = can_round(kind_of(build(nn.Parameter(torch.empty(1, 1)))), parameter.dtype)
    except (NotImplementedError, TypeError, AttributeError):  # a setting of FBGEMM's alone, or a placeholder
        is_known = False
    if not is_known:
        raise UserError(
            f"{table} has {kinds[0].__name__} with {settings} in backward, which sharded TT tables of {parameter.dtype} don't "
            "support: apply SGD without momentum, Adagrad, RowWiseAdagrad, Adam or AdamW (without amsgrad, not of float16), or "
            "give tables to an optimizer when sharded"
        )
    return build


def apply_optimizers_(bag: TTEmbeddingBag, builders: OptimizerBuilders, *, in_lookup: bool) -> None:
    """Give parameters of a shard new optimizers in backward; the parameters are replaced, so that no old hooks remain.

    Args:
        bag: a shard.
        builders: from `new_optimizers`, for the whole table.
        in_lookup: whether the lookup may update slices itself; otherwise, optimizers step when gradients are ready.
    """
    for name, build in builders.items():
        path, _, key = name.rpartition(".")
        module = bag.get_submodule(path)
        old = module.get_parameter(key)
        parameter: Any = nn.Parameter(old.detach())
        module.register_parameter(key, parameter)
        optimizer = build(parameter)
        init_state_(optimizer, parameter)
        parameter._in_backward_optimizers = [optimizer]
        parameter.register_post_accumulate_grad_hook(_step_)
        parameter.requires_grad_(old.requires_grad)  # which may be set again
        if in_lookup:
            register_update(parameter, optimizer)


def _step_(parameter: Any) -> None:
    step_(optimizer_of(parameter), parameter)
    parameter.grad = None


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
    shards: dict[Any, Any] = {each.core_0: each for each in model.modules() if hasattr(each, "as_whole")}
    tensors = {}
    for name, key, parameter, state in _entries(model, optimizer):
        value = state[key]
        if parameter in shards and isinstance(value, Tensor) and value.dim():
            if value.shape != parameter.shape:
                raise UserError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}, which can't be divided as the core is: use an optimizer "
                    "whose state has the parameter's shape"
                )
            value = shards[parameter].as_whole(value)
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
    entries, groups = list(_entries(model, optimizer)), [group for each in unwrapped(optimizer) for group in each.param_groups]
    has_state = any(group.get("momentum") != 0 for group in groups)  # not SGD without momentum
    trained = [each for group in groups for each in group["params"] if each.requires_grad and not is_fused(each)]
    if not entries and (state or (has_state and trained)):
        raise UserError(
            f"the {type(unwrapped(optimizer)[0]).__name__} has no state yet to load into: let it take a step, load the model, and "
            "then what optimizer_state returns"
        )
    shards: dict[Any, Any] = {each.core_0: each for each in model.modules() if hasattr(each, "as_whole")}
    for name, key, parameter, target in entries:
        if f"{name}/{key}" not in state:
            raise UserError(f"the state lacks {key!r} of {name!r}: give what optimizer_state returns for this model and optimizer")
        value = state[f"{name}/{key}"]
        if isinstance(value, DTensor) and parameter not in shards:
            raise UserError(
                f"{key!r} of {name!r} is divided over processes, and the table isn't: load it into one sharded as it was"
            )
        if isinstance(value, DTensor):  # in the core's layout, which fused optimizers take for granted
            value = torch.empty_like(parameter).copy_(shards[parameter].part_of(value, f"{key!r} of {name!r}"))
        target[key] = value


def clip_grad_norm_(model: nn.Module, max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale all gradients of a sharded model so that their norm is at most `max_norm`; every process of the group must call it.

    `torch.nn.utils.clip_grad_norm_` sees the gradients of one process. Those of tables, and parts of tables, that only one process
    holds differ by process, and so would the factors by which replicas are scaled: they would drift apart.

    Args:
        model: a `DistributedModelParallel`, or its `module`.
        max_norm: the largest norm.
        group: the processes over which the model is sharded; default all.

    Returns:
        The norm of the whole model's gradients before.
    """
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    sharded = [(path, module) for path, module in inner.named_modules() if isinstance(module, ShardedModule)]
    names, replicas = set[str](), set[str]()
    for path, module in sharded:
        own, plan = set(module.sharded_parameter_names(path)), getattr(module, "module_sharding_plan", {})
        whole = {table for table, each in plan.items() if each.sharding_type == ShardingType.DATA_PARALLEL.value}
        names, replicas = names | own, replicas | {name for name in own if name.split(".")[-2] in whole}
    names -= replicas  # of dense tables, whose gradients TorchRec averages itself
    trained = [(name in names, parameter) for name, parameter in inner.named_parameters() if parameter.grad is not None]
    device = next((parameter.device for _, parameter in trained), torch.device("cpu"))
    squares = torch.zeros(2, device=device)  # of replicas, and of what this process alone has
    for is_local, parameter in trained:
        squares[int(is_local)] += torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
    dist.all_reduce(squares[1:], group=group)
    norm = squares.sum().sqrt()
    nn.utils.clip_grads_with_norm_([parameter for _, parameter in trained], max_norm, norm)
    return norm


def _entries(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str, nn.Parameter, dict[str, Any]]]:
    """Yield name, key, parameter and the parameter's state, for each entry of it."""
    optimizers = unwrapped(optimizer)
    for name, parameter in model.named_parameters():
        states = (each.state[parameter] for each in optimizers if parameter in each.state and not is_fused(parameter))
        state: dict[str, Any] = next(states, {})
        for key in list(state):
            yield name, key, parameter, state
