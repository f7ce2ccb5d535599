"""Derivatives that operators with a backward pass of their own don't have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad


def in_plain_torch() -> bool:
    """Return whether torch.func or forward-mode derivatives are under way, which ignore gradients of registered operators."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate backward(ctx, gradient, *saved tensors), so that second derivatives raise an error.

    torch's decorator raises only if the gradient that comes in needs one: where that is constant, it would leave out what the
    second derivative owes to saved tensors.
    """
    refusing = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def with_saved(ctx: Any, gradient: Any) -> Any:
        return refusing(ctx, gradient, *ctx.saved_tensors)  # read once: an activation checkpoint gives them once

    return with_saved
