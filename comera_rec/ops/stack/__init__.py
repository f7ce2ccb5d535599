"""Cores of several tables side by side, so that one product serves them all.

T tables, m_t slices in a table's core, M slices of all of them; r_t, s_t a table's ranks, r and s the largest of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def stack_cores(cores: Sequence[Tensor], ranks: Sequence[Tensor] | None = None) -> Tensor:
    """Stack cores that differ in row modes and ranks, slice after slice, with the diagonal D on their left multiplied in.

    Ranks that a table lacks are zeros, which change no product.

    Args:
        cores: T tensors (r_t, m_t, n, s_t).
        ranks: T diagonals (r_t); None for the first core of a train.

    Returns:
        (M, r, n, s).
    """
    if all(core.device.type == "cpu" and core.dtype == torch.float32 for core in cores) and not torch.compiler.is_compiling():
        stacked: Tensor = _Stack.apply(len(cores), *cores, *(ranks or ()))
        return stacked
    scaled = cores if ranks is None else [rank[:, None, None, None] * core for rank, core in zip(ranks, cores, strict=True)]
    left, right = (max(core.shape[axis] for core in cores) for axis in (0, 3))
    padded = [F.pad(core, (0, right - core.shape[3], 0, 0, 0, 0, 0, left - core.shape[0])) for core in scaled]
    return torch.cat([core.transpose(0, 1) for core in padded])


def _kernels() -> Any:
    return importlib.import_module(f"{__name__}.numba")  # late: whoever only imports the package need not wait for Numba


class _Stack(torch.autograd.Function):
    """The same in one pass over memory, and one back."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.count = count
        ctx.save_for_backward(*tensors)
        return _kernels().forward(tensors[:count], tensors[count:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, *_kernels().backward(grad, ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :])
