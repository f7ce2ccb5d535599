"""Derivatives that operators with a backward pass of their own don't have."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def in_plain_torch() -> bool:
    """Return whether torch.func or forward-mode derivatives are under way, which ignore gradients of registered operators."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate backward(ctx, gradient, *saved tensors), so that second derivatives raise an error.

    What torch's decorator returns doesn't depend on the incoming gradient and the saved tensors, so a second derivative with
    respect to given inputs would leave out what it owes to them.
    """

    @wraps(backward)
    def with_saved(ctx: Any, gradient: Any) -> Any:
        saved = ctx.saved_tensors  # read once: an activation checkpoint gives them once
        with torch.no_grad():
            results = backward(ctx, gradient, *saved)
        sources = [each for each in (gradient, *saved) if each is not None and each.requires_grad]
        if not (torch.is_grad_enabled() and sources):
            return results
        refusing = iter(_Refusing.apply(*(each for each in results if each is not None), *sources))
        return tuple(None if each is None else next(refusing) for each in results)

    return with_saved


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "lookups and cross networks can't be differentiated twice: give TT tables impl='reference' or float64, or use "
            "export_dense's model"
        )
