"""Cores of several tables side by side, so that one product serves them all.

T tables, m_t slices in a table's core, M slices of all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def stack_cores(cores: Sequence[Tensor], ranks: Sequence[Tensor] | None = None) -> Tensor:
    """Stack cores that differ only in their row modes, slice after slice, with the diagonal D on their left multiplied in.

    Args:
        cores: T tensors (r, m_t, n, s).
        ranks: T diagonals (r); None for the first core of a train.

    Returns:
        (M, r, n, s).
    """
    if all(core.device.type == "cpu" and core.dtype == torch.float32 for core in cores) and not torch.compiler.is_compiling():
        stacked: Tensor = _Stack.apply(len(cores), *cores, *(ranks or ()))
        return stacked
    scaled = cores if ranks is None else [rank[:, None, None, None] * core for rank, core in zip(ranks, cores, strict=True)]
    return torch.cat([core.transpose(0, 1) for core in scaled])


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
