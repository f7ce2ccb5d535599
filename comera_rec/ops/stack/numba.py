"""`stack_cores` on CPU, compiled by Numba."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numba import carray
from torch import Tensor

from comera_rec.ops.gathered_matmul.numba import plain
from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task


def forward(cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
    """T cores (r, m_t, n, s), T diagonals (r) or none -> (M, r, n, s)."""
    cores, ranks = [plain(core) for core in cores], [plain(rank) for rank in ranks]
    left, _, n, right = cores[0].shape
    stacked = torch.empty(sum(core.shape[1] for core in cores), left, n, right)
    if stacked.numel():
        _stack(len(cores) * left, _tables(cores, ranks), stacked, left, n * right)
    return stacked


def backward(grad: Tensor, cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the cores, and of the diagonals."""
    cores, ranks, grad = [plain(core) for core in cores], [plain(rank) for rank in ranks], plain(grad)
    left, _, n, right = cores[0].shape
    grad_cores, grad_ranks = [torch.empty_like(core) for core in cores], [torch.zeros_like(rank) for rank in ranks]
    if grad.numel():
        of_grads = _tables(grad_cores, grad_ranks)
        _stack_backward(len(cores) * left, _tables(cores, ranks), of_grads, grad, left, n * right)
    return grad_cores + grad_ranks


def _tables(cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
    """Per table the addresses of its core and diagonal (or zero), its slices and those before it."""
    before = accumulate((core.shape[1] for core in cores), initial=0)
    addresses = [rank.data_ptr() for rank in ranks] or [0] * len(cores)
    return torch.tensor([[c.data_ptr(), rank, c.shape[1], first] for c, rank, first in zip(cores, addresses, before, strict=False)])


@kernel
def _stack(params):  # type: ignore[no-untyped-def]
    """A task is one left rank index of one table."""
    left, width = params[4], params[5]
    task = next_task(params)
    while task < params[1]:
        table, x = int64_at(params[2] + 32 * (task // left)), task % left
        count, first = table[2], table[3]
        scale = float32_at(table[1])[x] if table[1] else np.float32(1)
        core = carray(float32_at(table[0] + 4 * x * count * width), (count, width))
        stacked = carray(float32_at(params[3] + 4 * first * left * width), (count, left, width))
        for i in range(count):
            for j in range(width):
                stacked[i, x, j] = scale * core[i, j]
        task = next_task(params)


@kernel
def _stack_backward(params):  # type: ignore[no-untyped-def]
    left, width = params[5], params[6]
    task = next_task(params)
    while task < params[1]:
        table, of_grad, x = int64_at(params[2] + 32 * (task // left)), int64_at(params[3] + 32 * (task // left)), task % left
        count, first = table[2], table[3]
        core = carray(float32_at(table[0] + 4 * x * count * width), (count, width))
        grad_core = carray(float32_at(of_grad[0] + 4 * x * count * width), (count, width))
        grad = carray(float32_at(params[4] + 4 * first * left * width), (count, left, width))
        if table[1]:
            scale, total = float32_at(table[1])[x], 0.0
            for i in range(count):
                for j in range(width):
                    grad_core[i, j] = scale * grad[i, x, j]
                    total += core[i, j] * grad[i, x, j]
            float32_at(of_grad[1])[x] = total
        else:
            for i in range(count):
                for j in range(width):
                    grad_core[i, j] = grad[i, x, j]
        task = next_task(params)
