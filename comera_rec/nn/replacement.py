"""Replacement of a model's modules by TT modules, which keep whatever the rest of the model relies on."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from data_pipeline.errors import UserError

FilterFn = Callable[[nn.Module, str], bool]
"""(module, fully qualified name) -> whether to consider it."""


def parameter_owners(model: nn.Module, whole: Collection[nn.Module] = ()) -> dict[Tensor, list[tuple[str, nn.Module]]]:
    """Map each parameter to the (fully qualified name, module) of every module that registers it.

    Modules that hold it in an attribute that registers nothing, or a container of Python, are among them, by the attribute's name:
    the parameter itself, its module, or one around that in which nothing is replaced.

    Args:
        whole: modules that are replaced with all that is in them.
    """
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    parents = set(model.modules()) - {part for module in whole for part in module.modules()}
    found: dict[int, list[Tensor]] = {}  # by attribute
    for name, module in model.named_modules():
        for registered in _registered(module):
            owners.setdefault(registered, []).append((name or "the model", module))
        for attribute, value in vars(module).items():
            if attribute not in _REGISTERED and isinstance(value, (*_CONTAINERS, nn.Module, Tensor)):
                if id(value) not in found:
                    found[id(value)] = list(_held((value,), parents))
                for parameter in found[id(value)]:
                    owners.setdefault(parameter, []).append((f"{name}.{attribute}".lstrip("."), module))
    return owners


_REGISTERED = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_PLAIN = {str, bytes, int, float, bool, type(None)}


def _held(container: Any, parents: Collection[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters in a container, and those of modules in it; of `parents`, only their own."""
    containers, seen = [container], set[int]()
    while containers:
        container = containers.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        values = (*container, *container.values()) if isinstance(container, dict) else container
        for value in [value for value in values if type(value) not in _PLAIN]:  # a vocabulary is passed over quickly
            if issubclass(type(value), Tensor):  # isinstance would ask what a dead weak reference is for
                if isinstance(value, nn.Parameter):
                    yield value
            elif issubclass(type(value), nn.Module):
                for module in (value,) if value in parents else value.modules():
                    yield from _registered(module)
            elif issubclass(type(value), _CONTAINERS):
                containers.append(value)


def _registered(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters; TorchRec's fused tables override `parameters`."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def keep_buffers_hooks_and_mode_(module: nn.Module, replaced: nn.Module, *, memo: dict[int, Any] | None = None) -> nn.Module:
    """Give a module the buffers, the hooks of calls, and the training mode of the one that it replaces; return the module.

    They are the same objects, so that handles still remove hooks; or, with the memo of `copy.deepcopy`, copies.
    """
    for name in _HOOKS:
        hooks = getattr(replaced, name)
        setattr(module, name, hooks if memo is None else copy.deepcopy(hooks, memo))
    for name, buffer in replaced.named_buffers(recurse=False):
        if name != "row_order":  # a TT table's own
            kept = buffer if memo is None else buffer.clone()
            module.register_buffer(name, kept, persistent=name not in replaced._non_persistent_buffers_set)
    return module.train(replaced.training)


def replace_modules_(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they are registered, in every parent that shares them.

    Returns:
        The model, or its replacement if the model itself is one of the old modules.
    """
    if model in replacements:
        return replacements[model]
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacements[module])
    return model


def reason_to_stay_dense(
    module: nn.Module,
    owners: Mapping[Tensor, list[tuple[str, nn.Module]]],
    alike: Collection[nn.Module] = (),
    *,
    init: str,
    is_called: bool = True,
) -> str | None:
    """Return why a TT module can't take a dense module's place, or None if it can.

    Args:
        module: a dense module with a weight.
        owners: `parameter_owners` of the model.
        alike: modules that may share the weight.
        init: what the TT module starts from, "random" or "tt_svd".
        is_called: whether the TT module is called as the dense one is, so that hooks of calls run.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters, as weight_norm, spectral_norm and pruning do"
    others = [name for name, _ in (*module.named_parameters(), *module.named_children()) if name not in ("weight", "bias")]
    if others:
        return f"it also holds {others[0]!r}, which a TT module would not have"
    if "forward" in vars(module):
        return "its forward is another than that of its class"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which a TT module's cores would not have"
    if not is_called and any(getattr(module, name) for name in _HOOKS if name.endswith("hooks")):
        return "it has hooks, but a collection doesn't call its TT tables"
    if init == "random" and not weight.requires_grad and not weight.is_meta:
        return "it is frozen, and random values would never learn: give init='tt_svd', or freeze it afterwards"
    for name, owner in owners[weight]:
        if all(each is not weight for each in owner.parameters(recurse=False)):
            return f"{name!r} holds it, and would go on to: fill that afterwards"
        if owner is not module and owner not in alike:
            return f"its weight is also that of {name!r}"
    return None


def require_no_optimizer(weight: Tensor, name: str) -> None:
    """Raise ValueError for a weight that an optimizer updates in backward."""
    if hasattr(weight, "_in_backward_optimizers"):
        raise UserError(f"{name!r} has an optimizer in backward, which a TT module would not have: compress first, then apply it")


def require_values(weight: Tensor, name: str) -> None:
    """Raise ValueError for a weight on the meta device, which TT-SVD can't start from."""
    if weight.is_meta:
        raise UserError(f"{name!r} is on the meta device, without values to start from: give init='random'")
