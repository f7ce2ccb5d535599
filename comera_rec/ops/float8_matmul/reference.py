"""`float8_matmul` by definition: each operand is rounded, then they are multiplied in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from comera_rec.ops.float8_matmul import BACKWARD, FORWARD, quantize


def float8_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, K] and [K, N] -> [M, N] bfloat16; gradients as if nothing had been rounded, from a rounded upstream gradient."""
    exact = _rounded_straight_through(a) @ _rounded_straight_through(b)
    if exact.requires_grad:
        exact.register_hook(lambda grad: rounded(grad, BACKWARD))
    out = exact.bfloat16()
    return out if bias is None else out + bias.bfloat16()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to a float8 format, in float64."""
    values, scale = quantize(x, dtype)
    return values.double() * scale.double()


def _rounded_straight_through(x: Tensor) -> Tensor:
    exact = x.double()
    return exact + (rounded(x, FORWARD) - exact).detach()
