"""Physical truncation: small ranks are sliced out of cores, rank parameters, gradients and optimizer state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from comera_rec.nn import TTModule, named_tt_modules, replace_data_
from comera_rec.ops.bags.updates import is_row_wise
from comera_rec.rank.selection import Masks, above_threshold
from data_pipeline.errors import UserError


def count_tt_params(model: nn.Module) -> int:
    """Count the parameters of all TT modules of a model, S(D), without biases."""
    return sum(module.whole_shape.num_params for _, module in named_tt_modules(model))


def truncate_ranks_(model: nn.Module, optimizer: Optimizer | None = None, *, threshold: float) -> dict[str, tuple[int, ...]]:
    """Remove every rank whose |D| is below a threshold, which makes later steps smaller and faster.

    Parameters keep their identity and names. Optimizer state of the same shape (momenta, second moments, Adagrad sums) and
    accumulated gradients are sliced with them, also for optimizers applied in backward. A module with a bond that loses all its
    ranks outputs zero (plus its bias). DistributedDataParallel must wrap the model again afterwards, because its hooks refer to
    the old gradients.

    Args:
        model: any module that contains TT modules.
        optimizer: the optimizer of the model's parameters, if there is one.
        threshold: ranks with |D| below it are removed.

    Raises:
        ValueError: for a negative threshold; before anything is changed, for an optimizer without parameters that would change, or
            with state of a shape that can't be sliced.

    Returns:
        The ranks of every TT module after truncation, by fully qualified name.
    """
    if not threshold >= 0:
        raise UserError(f"threshold is {threshold}: give a non-negative number")
    modules = dict(named_tt_modules(model))
    masks = above_threshold([magnitudes_of(module) for module in modules.values()], threshold)
    if optimizer:
        require_optimized({name: modules[name] for name, kept in zip(modules, masks, strict=True) if _cuts(kept)}, optimizer)
    keep_ranks_(list(modules.values()), masks, optimizer)
    return {name: module.shape.ranks for name, module in modules.items()}


def magnitudes_of(module: TTModule) -> list[Tensor]:
    """Return |D_k| [r_k] of every bond."""
    return [rank.detach().abs().flatten() for rank in module.rank_parameters()]


def keep_ranks_(modules: Sequence[TTModule], masks: Masks, optimizer: Optimizer | None = None) -> None:
    """Slice TT modules, their gradients and optimizer state to the ranks that masks keep.

    Raises:
        ValueError: before anything is changed, for optimizer state of a shape that can't be sliced.
    """
    changing = [(module, kept) for module, kept in zip(modules, masks, strict=True) if _cuts(kept)]
    require_known_states([module for module, _ in changing], optimizer)
    for module, kept in changing:
        _slice_module_(module, kept, optimizer)


def _cuts(masks: Sequence[Tensor]) -> bool:
    return not all(bool(mask.all()) for mask in masks)


def _slice_module_(module: TTModule, masks: Sequence[Tensor], optimizer: Optimizer | None) -> None:
    device = module.core_0.device
    kept = [mask.nonzero().flatten().to(device) for mask in masks]
    for k, (core, first, last) in enumerate(zip(module.cores(), [None, *kept], [*kept, None], strict=True)):

        def cut_core(tensor: Tensor, k: int = k, first: Tensor | None = first, last: Tensor | None = last) -> Tensor:
            return module.laid_out(k, _cut(tensor, {0: first, 3: last}))

        _replace_parameter_(core, cut_core, optimizer)
    for rank, index in zip(module.rank_parameters(), kept, strict=True):
        _replace_parameter_(rank, partial(_cut, indices={0: index}), optimizer)
    module.shape = module.shape.with_ranks([len(index) for index in kept])


def _cut(tensor: Tensor, indices: dict[int, Tensor | None]) -> Tensor:
    for dim, index in indices.items():
        if index is not None:
            tensor = tensor.index_select(dim, index)
    return tensor


def _replace_parameter_(parameter: nn.Parameter, change: Callable[[Tensor], Tensor], optimizer: Optimizer | None) -> None:
    """Change the sizes of a parameter in place, of its gradient and of every optimizer state tensor of its shape."""
    for each in _optimizers_of(parameter, optimizer):
        state = each.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = change(value)
    gradient = parameter.grad
    replace_data_(parameter, change(parameter.data))
    if gradient is not None:
        parameter.grad = change(gradient)


def require_optimized(modules: Mapping[str, TTModule], optimizer: Optimizer) -> None:
    """Raise ValueError unless the optimizer, or one that is applied in backward, has the parameters of TT modules."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in modules.items():
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            is_optimized = id(parameter) in optimized or hasattr(parameter, "_in_backward_optimizers")
            if parameter.requires_grad and not is_optimized:
                raise UserError(
                    f"{parameter_name!r} is in no parameter group of this {type(optimizer).__name__}: build the optimizer after "
                    "all swaps, and combine several optimizers with torchrec.optim.CombinedOptimizer"
                )


def require_known_states(modules: Iterable[TTModule], optimizer: Optimizer | None) -> None:
    """Raise ValueError unless parameters of TT modules, and all optimizer state of them, can follow a change of ranks.

    State of the parameter's shape changes with it. Single numbers stay, and so does a number for each slice of a core, which
    row-wise Adagrad keeps; before its first step that optimizer has state of another shape, which it then replaces.
    """
    if optimizer and any(isinstance(each, torch.optim.LBFGS) for each in unwrapped(optimizer)):
        raise UserError("LBFGS keeps one state for all parameters: ranks can't change under it, use another optimizer")
    for parameter in (p for module in modules for p in (*module.cores(), *module.rank_parameters())):
        if isinstance(parameter, DTensor):
            raise UserError("fully_shard cut TT modules into parts, whose ranks can't change: leave them out, and replicate them")
        for each in _optimizers_of(parameter, optimizer):
            state = each.state.get(parameter, {})
            if is_row_wise(each) and not state.get("step"):
                continue
            for key, value in state.items():
                by_slice = parameter.shape[1:2] if parameter.dim() == 4 else ()
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape not in (parameter.shape, by_slice):
                    raise UserError(
                        f"{type(each).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(parameter.shape)}: ranks can't change under it; "
                        "use an optimizer whose state has the parameter's shape"
                    )


def _optimizers_of(parameter: nn.Parameter, optimizer: Optimizer | None) -> list[Optimizer]:
    """List the optimizers that may have a parameter's state: those applied in backward or, without any, the given one."""
    return [*getattr(parameter, "_in_backward_optimizers", ())] or (unwrapped(optimizer) if optimizer else [])


def unwrapped(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers that hold the state, within TorchRec's wrappers and combinations or torch's `ZeroRedundancyOptimizer`.

    Wrappers copy the `state` once, and don't see what it becomes.

    Raises:
        ValueError: for TorchRec's `SemisyncOptimizer`, whose global optimizer has other copies of parameters, and state of them.
    """
    if hasattr(optimizer, "_global_optimizer"):
        raise UserError(f"a {type(optimizer).__name__} has two optimizers of each parameter: give the local one, and keep TT ranks")
    inner = getattr(optimizer, "_optimizer", getattr(optimizer, "optim", None))
    if isinstance(inner, Optimizer):
        return unwrapped(inner)
    parts = getattr(optimizer, "optimizers", ())
    return [each for _, part in parts for each in unwrapped(part)] or [optimizer]
