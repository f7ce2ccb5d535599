"""Cores of several tables as one tensor of slices, for products on a GPU; `reference.stack_tables` defines the result.

The number of kernel launches grows with the tables only where their ranks differ. T tables of M slices together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.launch import rank_bucket
from comera_rec.ops.plan.reference import on_device


def stack_tables(cores: Sequence[Sequence[Tensor]], diagonals: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Stack slices as the reference does, with ranks rounded up to those that kernels are compiled for."""
    last = len(cores[0]) - 1
    ranks = [rank_bucket(max(core.shape[3] for core in kth_cores)) for kth_cores in zip(*cores, strict=True)]
    stacked = []
    for k, kth_cores in enumerate(zip(*cores, strict=True)):
        left, right = ranks[k - 1] if k else 1, ranks[k] if k < last else 1
        slices = _Stack.apply(left, right, *kth_cores)
        if k and diagonals[0]:
            counts = [core.shape[1] for core in kth_cores]
            slices = _Scale.apply(slices, counts, *(of_table[k - 1].flatten() for of_table in diagonals))
        stacked.append(slices)
    return stacked


class _Stack(torch.autograd.Function):
    """Stack cores (r, m, n, s) to (M, left, n, right), with zeros beyond each core's ranks."""

    @staticmethod
    def forward(ctx: Any, left: int, right: int, *cores: Tensor) -> Tensor:
        ctx.shapes = [core.shape for core in cores]
        if all((core.shape[0], core.shape[3]) == (left, right) for core in cores):
            return torch.cat([core.transpose(0, 1) for core in cores])
        slices = cores[0].new_zeros(sum(core.shape[1] for core in cores), left, cores[0].shape[2], right)
        for part, core in zip(_parts(slices, ctx.shapes), cores, strict=True):
            part.copy_(core)
        return slices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_parts(grad, ctx.shapes)


class _Scale(torch.autograd.Function):
    """Multiply the `counts` slices (r, n, s) of each table by its diagonal; beyond a shorter diagonal, slices are zero already."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, counts: Sequence[int], *diagonals: Tensor) -> Tensor:
        rank = slices.shape[1]
        if all(len(diagonal) == rank for diagonal in diagonals):
            padded = torch.stack(diagonals)
        else:
            padded = slices.new_zeros(len(diagonals), rank)
            for row, diagonal in zip(padded, diagonals, strict=True):
                row[: len(diagonal)].copy_(diagonal)
        (repeats,) = on_device([counts], slices.device)
        scale = padded.repeat_interleave(repeats, dim=0, output_size=len(slices))[:, :, None, None]
        ctx.save_for_backward(slices, scale)
        ctx.counts, ctx.ranks = counts, [len(diagonal) for diagonal in diagonals]
        return slices * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slices, scale = ctx.saved_tensors
        slice_sums = (grad * slices).sum((2, 3)).split(ctx.counts)
        diagonal_gradients = [part[:, :rank].sum(0) for part, rank in zip(slice_sums, ctx.ranks, strict=True)]
        return grad * scale, None, *diagonal_gradients


def _parts(slices: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return each core's view of the slices."""
    bounds = pairwise(accumulate((shape[1] for shape in shapes), initial=0))
    return [
        slices[first:end, : shape[0], :, : shape[3]].transpose(0, 1) for (first, end), shape in zip(bounds, shapes, strict=True)
    ]
