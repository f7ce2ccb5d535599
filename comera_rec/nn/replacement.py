"""Replacement of a model's modules by TT modules, which keep whatever the rest of the model relies on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn

from data_pipeline.errors import UserError

FilterFn = Callable[[nn.Module, str], bool]
"""(module, fully qualified name) -> whether to consider it."""


def parameter_owners(model: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module]]]:
    """Map each parameter to the (fully qualified name, module) of every module that registers it."""
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, module))
    return owners


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def keep_buffers_hooks_and_mode_(module: nn.Module, replaced: nn.Module) -> nn.Module:
    """Give a module the buffers, the hooks of calls, and the training mode of the one that it replaces; return the module."""
    for name in _HOOKS:  # the same objects, so that handles still remove hooks
        setattr(module, name, getattr(replaced, name))
    for name, buffer in replaced.named_buffers(recurse=False):
        module.register_buffer(name, buffer, persistent=name not in replaced._non_persistent_buffers_set)
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


def reason_for_dense_weight(
    module: nn.Module, owners: Mapping[Tensor, list[tuple[str, nn.Module]]], alike: Collection[nn.Module] = ()
) -> str | None:
    """Return why a module's weight can't become that of a TT module, or None if it can.

    Args:
        module: a dense module with a weight.
        owners: `parameter_owners` of the model.
        alike: modules that may share the weight.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters, as weight_norm, spectral_norm and pruning do"
    sharers = [name for name, owner in owners[weight] if owner is not module and owner not in alike]
    return f"its weight is also that of {sharers[0]!r}" if sharers else None


def require_values(weight: Tensor, name: str) -> None:
    """Raise ValueError for a weight on the meta device, which TT-SVD can't start from."""
    if weight.is_meta:
        raise UserError(f"{name!r} is on the meta device, without values to start from: give init='random'")
