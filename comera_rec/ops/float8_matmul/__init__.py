"""`float8_matmul`: a product of two matrices that are rounded to 8 bits first, in both directions.

Shapes: M x K times K x N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.errors import UserError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of the operands and of upstream gradients: three bits of mantissa, or two and more range."""

_TILE = 16  # sides of CUDA's products are multiples of it


class Float8(NamedTuple):
    """A tensor as 8-bit values times one scale."""

    values: Tensor
    scale: Tensor
    """float32, a scalar; on the device, so that nothing waits for it."""

    @property
    def mT(self) -> Float8:  # noqa: N802, as Tensor's
        """The transposed matrix."""
        return Float8(self.values.mT, self.scale)


def quantize(x: Tensor, dtype: torch.dtype) -> Float8:
    """Round to a float8 format, scaled such that the largest magnitude becomes the format's largest finite value.

    scale = max |x| / max(dtype), values = round(x / scale): Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433),
    with the maximum of the tensor at hand. Zeros stay zeros. With an infinite or undefined entry all products are undefined.

    Args:
        x: at least one number.
        dtype: `FORWARD` or `BACKWARD`.
    """
    x = x.float()
    scale = (x.abs().amax() / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    return Float8((x / scale).to(dtype), scale)


def float8_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias with a and b in e4m3; their gradients use the upstream gradient in e5m2.

    The scales are those of `quantize`, sums are in float32. The backward pass keeps the 8-bit operands. CoMERA, Yang et al. (arXiv
    2405.14377), trains TT modules in low precision; the choice of formats follows Micikevicius et al. (arXiv 2209.05433).

    Args:
        a: [M, K] float32 or bfloat16, like its gradient.
        b: [K, N] float32 or bfloat16, like its gradient.
        bias: [N], added in bfloat16; or None.

    Returns:
        [M, N] bfloat16.
    """
    empty = a.numel() == 0 or b.numel() == 0  # nothing to take a maximum of
    out: Tensor = a.bfloat16() @ b.bfloat16() if empty else _Float8Matmul.apply(a, b)
    return out if bias is None else out + bias.bfloat16()


def require_float8(device: torch.device) -> None:
    """Raise ValueError unless `float8_matmul` runs on the device."""
    rocm = device.type == "cuda" and torch.version.hip  # some of its GPUs have other float8 formats
    if device.type not in ("cpu", "cuda", "meta") or rocm or not hasattr(torch, "_scaled_mm"):
        raise UserError(f"float8 products don't run on {device.type} with torch {torch.__version__}: use bfloat16")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        actual = ".".join(map(str, capability))
        raise UserError(f"float8 products need a GPU of compute capability 8.9 or later, and {device} has {actual}: use bfloat16")


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a8, b8 = quantize(a, FORWARD), quantize(b, FORWARD)
        ctx.save_for_backward(*a8, *b8)
        ctx.dtypes = a.dtype, b.dtype
        return _multiply(a8, b8, torch.bfloat16)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        saved, grad8 = ctx.saved_tensors, quantize(grad, BACKWARD)
        a8, b8 = Float8(*saved[:2]), Float8(*saved[2:])
        grad_a = _multiply(grad8, b8.mT, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_b = _multiply(a8.mT, grad8, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def _multiply(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """Multiply [M, K] by [K, N], not both e5m2."""
    return (_scaled_mm_on_cpu if a.values.device.type == "cpu" else _scaled_mm)(a, b, dtype)


def _scaled_mm_on_cpu(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """Compute the same in float32, because torch's emulation takes milliseconds even for the smallest matrices."""
    with torch.autocast("cpu", enabled=False):
        return ((a.values.float() @ b.values.float()) * (a.scale * b.scale)).to(dtype)


def _scaled_mm(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """Call torch's private function of the same name.

    On CUDA it needs a row-major first operand, a column-major second operand, and sides that are multiples of 16.
    """
    m, n = a.values.shape[0], b.values.shape[1]
    left, right = _whole_tiles(a.values), _whole_tiles(b.values.mT).mT
    out = torch._scaled_mm(left, right, a.scale, b.scale, out_dtype=dtype, use_fast_accum=False)
    return out[:m, :n].contiguous()


def _whole_tiles(x: Tensor) -> Tensor:
    """Return the matrix in row-major order, with zeros beside and below it."""
    below, beside = (-size % _TILE for size in x.shape)
    return F.pad(x, (0, beside, 0, below)) if below or beside else x.contiguous()
