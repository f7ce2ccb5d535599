"""Bags of products on CPU, compiled by Numba. Sums run over a row's lookups in their order, so results don't depend on threads.

A place is where a row, or the gradient of one, begins, counted in elements from the first of the bags or of their gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops import bags
from comera_rec.ops.gathered_matmul.numba import COLS, ROWS, gradients, plain, products_into, require_within, split
from comera_rec.ops.gathered_matmul.numba import forward as multiply
from comera_rec.ops.simd.parallel import address_of, float32_at, int64_at, kernel, next_task, prefetch
from comera_rec.ops.simd.tile import sum_products

_TASKS = 128
_AHEAD = 12  # rows


def forward(
    a: Tensor, b: Tensor, p: Tensor, q: Tensor, inverse: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
) -> Tensor:  # fmt: skip
    """[B, F * N] bags; see `pool_products`."""
    offsets, count, width = plain(offsets), len(offsets) - 1, a.shape[1] * b.shape[2]
    if not _ascend(offsets.numpy(), len(inverse)):
        raise ValueError(f"offsets must ascend from 0 to at most {len(inverse)}, the number of ids")
    out = torch.empty(count // features, features * width)
    if not out.numel():
        return out
    order, starts, p, q = plain(order), *_without_padding(starts, p, q)
    if weights is None and a.shape[2] and len(inverse) == count and _have_one_each(offsets.numpy()):
        # A row is computed where its first lookup wants it, and copied from there to the others.
        places, row_places = torch.empty_like(order), torch.empty_like(p)
        _place_lookups(_TASKS, offsets, count, features, width, places)
        _place_rows(_TASKS, order, starts, places, len(p), row_places)
        require_within(p, len(a), "p")
        require_within(q, len(b), "q")
        products = products_into(out, row_places, plain(a), plain(b), plain(p), plain(q), torch.arange(len(p) + 1))
        _multiply_and_copy(_TASKS, _equal_shares(starts), order, starts, places, out, width, *products)
        return out
    inverse, weights = plain(inverse), None if weights is None else plain(weights)
    for first, beyond in _chunks(len(p), width):
        rows = multiply(a, b, p[first:beyond], q[first:beyond])
        _pool(_TASKS, out, rows, inverse, offsets, weights, width, count, features, mean, first, beyond)
        del rows  # before the next ones are made
    return out


def backward(
    grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, b and the weights."""
    offsets, order, grad = plain(offsets), plain(order), plain(grad)
    starts, p, q = _without_padding(starts, p, q)
    width = a.shape[1] * b.shape[2]
    places, factors = torch.zeros_like(order), None
    _place_lookups(_TASKS, offsets, len(offsets) - 1, features, width, places)
    if mean or weights is not None or int(offsets[-1]) < len(order):
        factors = torch.zeros(len(order)) if weights is None else plain(weights).clone()
        _scale_lookups(offsets.numpy(), mean, weights is None, factors.numpy())
    grad_weights = torch.zeros(0 if weights is None else len(order))
    parts = []
    for first, beyond in _chunks(len(p), width):
        some_p, some_q, some_starts = p[first:beyond], q[first:beyond], starts[first : beyond + 1]
        rows = None if weights is None else multiply(a, b, some_p, some_q)
        grad_rows = torch.empty(len(some_p), width)
        _sum_gradients(
            _TASKS, _equal_shares(some_starts), order, some_starts, places, factors, grad_rows, grad, rows, grad_weights, width,
            int(offsets[-1]),
        )  # fmt: skip
        parts.append(gradients(grad_rows.view(-1, a.shape[1], b.shape[2]), a, b, some_p, some_q))
        if len(parts) == 2:
            parts = [(parts[0][0].add_(parts[1][0]), parts[0][1].add_(parts[1][1]))]
    return parts[0][0], parts[0][1].mT, grad_weights


def _chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows that fit the buffer; an empty one if there are no rows."""
    step = max(1, bags.ROW_BUFFER_BYTES // (4 * max(width, 1)))
    return [(first, min(first + step, rows)) for first in range(0, max(rows, 1), step)]


def _without_padding(starts: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the rows that there are, which come first."""
    rows = int((p >= 0).sum())
    return plain(starts[: rows + 1]), plain(p[:rows]), plain(q[:rows])


def _equal_shares(starts: Tensor) -> Tensor:
    """[_TASKS + 1]: the first row of each task, such that all have about as many lookups."""
    bounds = torch.empty(_TASKS + 1, dtype=torch.int64)
    split(starts.numpy(), bounds.numpy())
    return bounds


@njit(nogil=True, cache=True)
def _ascend(offsets, count):  # type: ignore[no-untyped-def]
    is_sorted = True
    for i in range(1, len(offsets)):
        is_sorted &= offsets[i - 1] <= offsets[i]
    return is_sorted and len(offsets) > 0 and offsets[0] == 0 and offsets[-1] <= count


@njit(nogil=True, cache=True)
def _have_one_each(offsets):  # type: ignore[no-untyped-def]
    one_each = True
    for i in range(len(offsets)):
        one_each &= offsets[i] == i
    return one_each


@kernel
def _place_lookups(params):  # type: ignore[no-untyped-def]
    """The place of each lookup's bag; a task is a range of samples."""
    offsets, batch, features, width, places = int64_at(params[2]), params[3] // params[4], params[4], params[5], int64_at(params[6])
    task = next_task(params)
    while task < params[1]:
        first, beyond = batch * task // params[1], batch * (task + 1) // params[1]
        for feature in range(features):
            for sample in range(first, beyond):
                place = (sample * features + feature) * width
                for i in range(offsets[feature * batch + sample], offsets[feature * batch + sample + 1]):
                    places[i] = place
        task = next_task(params)


@njit(nogil=True, cache=True)
def _scale_lookups(offsets, mean, unweighted, factors):  # type: ignore[no-untyped-def]
    """By what a lookup's row is multiplied in its bag."""
    if unweighted:
        for bag in range(len(offsets) - 1):
            first, beyond = offsets[bag], offsets[bag + 1]
            for i in range(first, beyond):
                factors[i] = 1 / (beyond - first) if mean else 1


@kernel
def _place_rows(params):  # type: ignore[no-untyped-def]
    """The place of each row's first lookup."""
    order, starts, places, row_places = int64_at(params[2]), int64_at(params[3]), int64_at(params[4]), int64_at(params[6])
    task = next_task(params)
    while task < params[1]:
        for u in range(params[5] * task // params[1], params[5] * (task + 1) // params[1]):
            row_places[u] = places[order[starts[u]]]
        task = next_task(params)


@kernel
def _multiply_and_copy(params):  # type: ignore[no-untyped-def]
    """Products of every row put where its first lookup wants it, and copied to its others."""
    bounds, order, starts, places = int64_at(params[2]), int64_at(params[3]), int64_at(params[4]), int64_at(params[5])
    width, products = params[7], int64_at(address_of(params) + 64)
    task = next_task(params)
    while task < params[1]:
        sum_products(products, bounds[task], bounds[task + 1], products[ROWS], products[COLS])
        for u in range(bounds[task], bounds[task + 1]):
            row = carray(float32_at(params[6] + 4 * places[order[starts[u]]]), (width,))
            for t in range(starts[u] + 1, starts[u + 1]):
                out = carray(float32_at(params[6] + 4 * places[order[t]]), (width,))
                for n in range(width):
                    out[n] = row[n]
        task = next_task(params)


@kernel
def _pool(params):  # type: ignore[no-untyped-def]
    """Add some of the rows to bags of any length; a task is a range of samples."""
    inverse, offsets, weights = int64_at(params[4]), int64_at(params[5]), float32_at(params[6])
    weighted, width, bags, features, mean = params[6] != 0, params[7], params[8], params[9], params[10]
    first_row, beyond_rows = params[11], params[12]
    batch = bags // features
    task = next_task(params)
    while task < params[1]:
        for feature in range(features):
            for sample in range(batch * task // params[1], batch * (task + 1) // params[1]):
                start, end = offsets[feature * batch + sample], offsets[feature * batch + sample + 1]
                out = carray(float32_at(params[2] + 4 * width * (sample * features + feature)), (width,))
                if first_row == 0:
                    out[:] = 0
                for i in range(start, end):
                    ahead = inverse[min(i + _AHEAD, offsets[bags] - 1)] - first_row
                    for line in range(0, 4 * width, 64):
                        prefetch(params[3] + 4 * width * ahead + line)
                    if first_row <= inverse[i] < beyond_rows:
                        row = carray(float32_at(params[3] + 4 * width * (inverse[i] - first_row)), (width,))
                        factor = weights[i] if weighted else np.float32(1 / (end - start) if mean else 1)
                        for n in range(width):
                            out[n] += factor * row[n]
        task = next_task(params)


@kernel
def _sum_gradients(params):  # type: ignore[no-untyped-def]
    """Gradients of rows; and of weights, if there are rows to compare with."""
    bounds, order, starts, places = int64_at(params[2]), int64_at(params[3]), int64_at(params[4]), int64_at(params[5])
    factors, grad_weights, width, lookups_in_bags = float32_at(params[6]), float32_at(params[10]), params[11], params[12]
    task = next_task(params)
    while task < params[1]:
        last = starts[bounds[task + 1]] - 1  # of this task's lookups
        for u in range(bounds[task], bounds[task + 1]):
            out = carray(float32_at(params[7] + 4 * width * u), (width,))
            out[:] = 0
            for t in range(starts[u], starts[u + 1]):
                ahead = places[order[min(t + _AHEAD, last)]]
                for line in range(0, 4 * width, 64):
                    prefetch(params[8] + 4 * ahead + line)
                i = order[t]
                if i >= lookups_in_bags:
                    continue
                grad = carray(float32_at(params[8] + 4 * places[i]), (width,))
                factor = factors[i] if params[6] else np.float32(1)
                for n in range(width):
                    out[n] += factor * grad[n]
                if params[9]:
                    row = carray(float32_at(params[9] + 4 * width * u), (width,))
                    dot = np.float32(0)
                    for n in range(width):
                        dot += grad[n] * row[n]
                    grad_weights[i] = dot
        task = next_task(params)
