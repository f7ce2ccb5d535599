"""`stack_cores` on CPU, compiled by Numba."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops.gathered_matmul.numba import plain
from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task

_BLOCKS = 16  # of a table's slices; a task each
_FIELDS = 7  # of a table: core, diagonal, slices, slices of the tables before, r_t, runs of columns, entries of a run


def forward(cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
    """T cores (r_t, m_t, n, s_t), T diagonals (r_t) or none -> (M, r, n, s)."""
    cores, ranks = [plain(core) for core in cores], [plain(rank) for rank in ranks]
    left, n, right = max(core.shape[0] for core in cores), cores[0].shape[2], max(core.shape[3] for core in cores)
    stacked = torch.empty(sum(core.shape[1] for core in cores), left, n, right)
    if stacked.numel():
        _stack(len(cores) * _BLOCKS, _tables(cores, ranks, right), stacked, left, n * right, right)
    return stacked


def backward(grad: Tensor, cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the cores, and of the diagonals."""
    right = max(core.shape[3] for core in cores)
    alike = all(core.shape[3] == right for core in cores)
    if not ranks and alike and cores[0].shape[0] == 1 and grad.is_contiguous():
        return [part.view_as(core) for part, core in zip(grad.split([core.shape[1] for core in cores]), cores, strict=True)]
    cores, ranks = [plain(core) for core in cores], [plain(rank) for rank in ranks]
    grad_cores = [torch.empty_like(core) for core in cores]
    left = max(core.shape[0] for core in cores)
    grad_ranks = torch.zeros(len(ranks), _BLOCKS, left)
    if grad.numel():
        grad = grad.float().flatten(2)  # no copy where the last core's gradient comes transposed
        tables = _tables(cores, ranks, right), _tables(grad_cores, [], right)
        _stack_backward(len(cores) * _BLOCKS, *tables, grad, *grad.stride(), left, right, grad_ranks)
    return grad_cores + [sums[: len(rank)] for sums, rank in zip(grad_ranks.sum(1), ranks, strict=True)]


def _tables(cores: Sequence[Tensor], ranks: Sequence[Tensor], right: int) -> Tensor:
    """[T, _FIELDS]: addresses and sizes; the diagonal's address is zero where there is none."""
    before = accumulate((core.shape[1] for core in cores), initial=0)
    addresses = [rank.data_ptr() for rank in ranks] or [0] * len(cores)
    tables = []
    for core, rank, first in zip(cores, addresses, before, strict=False):
        # Where no column has ranks to add, all columns are one.
        columns, width = (1, core.shape[2] * right) if core.shape[3] == right else (core.shape[2], core.shape[3])
        tables.append((core.data_ptr(), rank, core.shape[1], first, core.shape[0], columns, width))
    return torch.from_numpy(np.array(tables, np.int64))  # torch.tensor takes five times as long


@kernel
def _stack(params):  # type: ignore[no-untyped-def]
    """A task is a block of one table's slices."""
    left, width, right = params[4], params[5], params[6]
    task = next_task(params)
    while task < params[1]:
        table, block = int64_at(params[2] + 8 * _FIELDS * (task // _BLOCKS)), task % _BLOCKS
        ranks, count, first, own_left, columns, own = float32_at(table[1]), table[2], table[3], table[4], table[5], table[6]
        core = carray(float32_at(table[0]), (own_left, count, columns, own))
        stacked = carray(float32_at(params[3] + 4 * first * left * width), (count, left, width))
        for i in range(count * block // _BLOCKS, count * (block + 1) // _BLOCKS):
            for x in range(own_left):
                scale = ranks[x] if table[1] else np.float32(1)
                for c in range(columns):
                    for j in range(own):
                        stacked[i, x, c * right + j] = scale * core[x, i, c, j]
                    if own < right:
                        stacked[i, x, c * right + own : (c + 1) * right] = 0
            stacked[i, own_left:] = 0
        task = next_task(params)


@kernel
def _stack_backward(params):  # type: ignore[no-untyped-def]
    by_slice, by_left, by_col, left, right = params[5], params[6], params[7], params[8], params[9]
    task = next_task(params)
    while task < params[1]:
        table, of_grad, block = (
            int64_at(params[2] + 8 * _FIELDS * (task // _BLOCKS)),
            int64_at(params[3] + 8 * _FIELDS * (task // _BLOCKS)),
            task % _BLOCKS,
        )
        ranks, count, own_left, columns, own = float32_at(table[1]), table[2], table[4], table[5], table[6]
        first, beyond = count * block // _BLOCKS, count * (block + 1) // _BLOCKS
        core = carray(float32_at(table[0]), (own_left, count, columns * own))
        grad_core = carray(float32_at(of_grad[0]), (own_left, count, columns * own))
        sums = carray(float32_at(params[10] + 4 * left * task), (left,))
        for x in range(own_left):
            for i in range(first, beyond):
                for c in range(columns):
                    grad = float32_at(params[4] + 4 * ((table[3] + i) * by_slice + x * by_left + c * right * by_col))
                    for j in range(own):
                        grad_core[x, i, c * own + j] = grad[j * by_col]
            if table[1]:
                sums[x] = _dot_and_scale(core[x, first:beyond], grad_core[x, first:beyond], ranks[x])
        task = next_task(params)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _dot_and_scale(core, grad, rank):  # type: ignore[no-untyped-def]
    """The gradient of the rank parameter; and in place that of the core, from that of their product."""
    total = np.float32(0)
    for i in range(core.shape[0]):
        for j in range(core.shape[1]):
            total += core[i, j] * grad[i, j]
            grad[i, j] *= rank
    return total
