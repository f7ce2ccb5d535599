"""`stack_cores` on CPU, compiled by Numba.

A slice of a core (r, m, n, s) is core[:, i]. In a core slices lie across each other; products read them end to end, [m, r, n, s].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops.gathered_matmul.numba import plain
from comera_rec.ops.gathered_matmul.numba import transposed as transpose
from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task
from comera_rec.ops.simd.tile import gather_rows, scale_rows

BLOCKS = 32  # of a core's slices; a task each
IN_CACHE = 4096  # floats of slices that wait there while a core's axes are exchanged


class Reordering(NamedTuple):
    """A core and its slices; addresses, and how many elements it is from one index to the next."""

    core: int
    core_left: int
    core_slice: int
    """The two last axes are contiguous."""
    grad_core: int
    """Contiguous."""
    diagonal: int
    """[r], multiplied in; zero where there is none."""
    m: int
    r: int
    runs: int
    """n, or 1 where what follows is all columns at once."""
    run: int
    """s."""
    slices: int
    by_slice: int
    by_left: int
    by_run: int
    by_col: int
    size: int
    """Of a slice with more elements than the core's, which are zeros; otherwise 0."""


FIELDS = len(Reordering._fields)


def forward(cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
    """T cores (r_t, m_t, n, s_t), T diagonals (r_t) or none -> (M, r, n, s)."""
    cores, ranks = [by_slices(core) for core in cores], [plain(rank) for rank in ranks]
    left, right = (max(core.shape[axis] for core in cores) for axis in (0, 3))
    counts = [core.shape[1] for core in cores]
    stacked = torch.empty(sum(counts), left, cores[0].shape[2], right)
    _stack(len(cores) * BLOCKS, reorderings(cores, ranks, stacked.split(counts)))
    return stacked


def slices(cores: Sequence[Tensor], ranks: Sequence[Tensor], *, transposed: bool = False) -> list[Tensor]:
    """Per core (r, m, n, s) and diagonal, if there are, [m, r, n * s] or, transposed, [m, n * s, r]."""
    if not ranks and all(core.transpose(0, 1).is_contiguous() for core in cores):
        found = [core.transpose(0, 1).flatten(2) for core in cores]
        return [transpose(each) for each in found] if transposed else found
    cores, ranks = [by_slices(core) for core in cores], [plain(rank) for rank in ranks]
    order = (1, 2, 3, 0) if transposed else (1, 0, 2, 3)
    found = [torch.empty([core.shape[axis] for axis in order]) for core in cores]
    _stack(len(cores) * BLOCKS, reorderings(cores, ranks, [each.movedim(3, 1) if transposed else each for each in found]))
    return [each.flatten(1, 2) if transposed else each.flatten(2) for each in found]


def backward(grad: Tensor, cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the cores, and of the diagonals."""
    counts = [core.shape[1] for core in cores]
    alike = all(core.shape[3] == grad.shape[3] for core in cores)
    if not ranks and alike and cores[0].shape[0] == 1 and grad.is_contiguous():
        return [part.view_as(core) for part, core in zip(grad.split(counts), cores, strict=True)]
    cores, ranks = [by_slices(core) for core in cores], [plain(rank) for rank in ranks]
    grad_cores = [torch.empty(core.shape) for core in cores]
    sums = torch.zeros(len(cores) * BLOCKS, grad.shape[1])
    _unstack(len(cores) * BLOCKS, reorderings(cores, ranks, grad.float().split(counts), grad_cores), sums, grad.shape[1])
    return grad_cores + rank_gradients(sums, torch.arange(len(cores)).repeat_interleave(BLOCKS), ranks)


def rank_gradients(sums: Tensor, of: Tensor, ranks: Sequence[Tensor]) -> list[Tensor]:
    """From those that tasks have summed, [tasks, r], each of one of the tables."""
    if not ranks:
        return []
    totals = torch.zeros(len(ranks), sums.shape[1]).index_add_(0, of, sums)
    return [total[: len(rank)] for total, rank in zip(totals, ranks, strict=True)]


def by_slices(core: Tensor) -> Tensor:
    """float32, contiguous in its own order of axes or in that of slices."""
    core = core.float()
    return core if core.transpose(0, 1).is_contiguous() else core.contiguous()


def reorderings(
    cores: Sequence[Tensor], ranks: Sequence[Tensor], slices: Iterable[Tensor], grad_cores: Iterable[Tensor] | None = None
) -> Tensor:
    """[T, FIELDS]; slices [m, r, n, s] of any strides."""
    tables = []
    for core, rank, own, grad_core in zip(cores, ranks or repeat(None), slices, grad_cores or cores, strict=False):
        left, count, n, right = core.shape
        by_slice, by_left, by_run, by_col = own.stride()
        by_col = by_col if right > 1 else by_run
        tables.append(
            Reordering(
                core=core.data_ptr(), core_left=core.stride(0), core_slice=core.stride(1), grad_core=grad_core.data_ptr(),
                diagonal=0 if rank is None else rank.data_ptr(), m=count, r=left,
                **({"runs": 1, "run": n * right} if by_run == right * by_col else {"runs": n, "run": right}),
                slices=own.data_ptr(), by_slice=by_slice, by_left=by_left, by_run=by_run, by_col=by_col,
                size=0 if own.shape[1] == left and own.shape[3] == right else own[0].numel(),
            )
        )  # fmt: skip
    return torch.from_numpy(np.array(tables, np.int64))  # torch.tensor takes five times as long


@kernel
def _stack(params):  # type: ignore[no-untyped-def]
    task = next_task(params)
    while task < params[1]:
        of, block = int64_at(params[2] + 8 * FIELDS * (task // BLOCKS)), task % BLOCKS
        core, core_left, core_slice, diagonal, count, left, runs, run = of[0], of[1], of[2], of[4], of[5], of[6], of[7], of[8]
        slices, by_slice, by_left, by_run, by_col, size = of[9], of[10], of[11], of[12], of[13], of[14]
        step = max(1, IN_CACHE // max(1, left * runs * run))
        end = count * (block + 1) // BLOCKS
        for first in range(count * block // BLOCKS, end, step):
            beyond = min(first + step, end)
            if size:
                carray(float32_at(slices + 4 * first * by_slice), ((beyond - first) * size,))[:] = 0
            for x in range(left):
                scale = float32_at(diagonal)[x] if diagonal else np.float32(1)
                for c in range(runs):
                    source = core + 4 * (x * core_left + first * core_slice + c * run)
                    target = slices + 4 * (first * by_slice + x * by_left + c * by_run)
                    if by_col == 1:
                        scale_rows(target, by_slice, source, core_slice, beyond - first, run, scale)
                    else:
                        for i in range(beyond - first):
                            for j in range(run):
                                float32_at(target)[i * by_slice + j * by_col] = scale * float32_at(source)[i * core_slice + j]
        task = next_task(params)


@kernel
def _unstack(params):  # type: ignore[no-untyped-def]
    task = next_task(params)
    while task < params[1]:
        of, block = int64_at(params[2] + 8 * FIELDS * (task // BLOCKS)), task % BLOCKS
        step = max(1, IN_CACHE // max(1, of[6] * of[7] * of[8]))
        end = of[5] * (block + 1) // BLOCKS
        for first in range(of[5] * block // BLOCKS, end, step):
            unstack(of, of[9], first, min(first + step, end), params[3] + 4 * params[4] * task)
        task = next_task(params)


@njit(nogil=True, cache=True)
def unstack(of, slices, first, beyond, sums):  # type: ignore[no-untyped-def]
    """The gradient of a core from that of some of its slices; to `sums` is added that of the diagonal, if there is one.

    Args:
        of: a `Reordering`.
        slices: where slice 0 would be.
    """
    core, core_left, core_slice, grad_core, diagonal, count = of[0], of[1], of[2], of[3], of[4], of[5]
    left, runs, run, by_slice, by_left, by_run, by_col = of[6], of[7], of[8], of[10], of[11], of[12], of[13]
    width = runs * run
    together = beyond - first if core_slice == width else 1  # slices whose x-th parts are contiguous
    for x in range(left):
        for c in range(runs):
            source = slices + 4 * (first * by_slice + x * by_left + c * by_run)
            target = grad_core + 4 * ((x * count + first) * width + c * run)
            gather_rows(target, width, source, by_slice, beyond - first, run, by_col)
        for i in range(first, beyond if diagonal else first, together):
            values, gradients = core + 4 * (x * core_left + i * core_slice), grad_core + 4 * (x * count + i) * width
            float32_at(sums)[x] += _dot_and_scale(values, gradients, together * width, float32_at(diagonal)[x])


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _dot_and_scale(core, grad, count, rank):  # type: ignore[no-untyped-def]
    """The gradient of a rank parameter; and in place that of the core, from that of their product."""
    values, gradients, total = carray(float32_at(core), (count,)), carray(float32_at(grad), (count,)), np.float32(0)
    for j in range(count):
        total += values[j] * gradients[j]
        gradients[j] *= rank
    return total
