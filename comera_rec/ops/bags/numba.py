"""Bags of products on CPU, compiled by Numba. Sums run over a row's lookups in their order, so results don't depend on threads.

A place is where a row, or the gradient of one, begins, counted in elements from the first of the bags or of their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops import bags
from comera_rec.ops.gathered_matmul.numba import forward as multiply
from comera_rec.ops.gathered_matmul.numba import (
    gradient_of_a,
    gradient_of_b,
    gradients,
    plain,
    products_into,
    require_within,
    run,
    sort_both,
    split,
    transposed,
)
from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task, prefetch
from comera_rec.ops.simd.tile import WIDTH, Products, stream, sum_products

NUMBERS = len(Products._fields)
C, A, ROWS, COLS = (Products._fields.index(name) for name in ("c", "a", "rows", "cols"))
_TASKS = 128
_AHEAD = 12  # lookups
_BLOCK = 2048  # floats of rows that wait in cache to be copied


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
        # Rows go from cache straight to their lookups' places.
        places, one_each = torch.empty_like(order), torch.arange(len(p) + 1)
        _place_lookups(_TASKS, offsets, count, features, width, places)
        require_within(p, len(a), "p")
        require_within(q, len(b), "q")
        products = products_into(out, one_each, plain(a), plain(b), plain(p), plain(q), one_each)._replace(c_slice=width)
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
    x: Tensor | None, y: Tensor | None, i: Tensor | None, j: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, b, the weights and nothing; or, where a is a product, of x, b, the weights and y."""
    offsets, order, grad = plain(offsets), plain(order), plain(grad)
    starts, p, q = _without_padding(starts, p, q)
    width = a.shape[1] * b.shape[2]
    places, factors = torch.zeros_like(order), None
    _place_lookups(_TASKS, offsets, len(offsets) - 1, features, width, places)
    if mean or weights is not None or int(offsets[-1]) < len(order):
        factors = torch.zeros(len(order)) if weights is None else plain(weights).clone()
        _scale_lookups(offsets.numpy(), mean, weights is None, factors.numpy())
    grad_weights = torch.zeros(0 if weights is None else len(order))
    of_left, of_y, of_b = _Sum(len(a if x is None else x)), _Sum(0 if y is None else len(y)), _Sum(len(b))

    def add(rows: slice) -> None:
        some_p, some_q, some_starts, alone = p[rows], q[rows], starts[rows.start : rows.stop + 1], len(p[rows]) == len(p)
        of_p, of_q = _range(some_p, len(a) if alone and x is None else 0), _range(some_q, len(b) if alone else 0)
        products = None if weights is None else multiply(a, b, some_p, some_q)
        lookups = (order, some_starts, places, factors, grad, products, grad_weights, width, int(offsets[-1]))
        some_a, some_b = plain(a[of_p]), transposed(plain(b[of_q]))
        grad_a, grad_b = _gradients(some_a, some_b, some_p - of_p.start, some_q - of_q.start, some_starts, *lookups)
        of_b.add(grad_b, of_q)
        if x is None or y is None or i is None or j is None:
            of_left.add(grad_a, of_p)
            return
        some_i, some_j = plain(i[of_p]), plain(j[of_p])
        of_i, of_j = _range(some_i, len(x) if alone else 0), _range(some_j, len(y) if alone else 0)
        some_x, some_y = x[of_i], y[of_j].flatten(2)
        grad_a = grad_a.view(len(grad_a), some_x.shape[1], some_y.shape[2])
        grad_x, grad_y = gradients(grad_a, some_x, some_y, some_i - of_i.start, some_j - of_j.start)
        of_left.add(grad_x, of_i)
        of_y.add(grad_y, of_j)

    most_rows = max(1, bags.ROW_BUFFER_BYTES // (4 * max(1, width)))
    bounds = np.array([0, len(a)]) if j is None else _bounds(plain(j[_range(p)]).numpy())
    for rows in _pieces(p, most_rows, bounds, len(a) if j is None else bags.SLICES_AT_ONCE):
        add(rows)
    grad_y = of_y.total if y is None else of_y.total.mT.unflatten(2, y.shape[2:])
    return of_left.total, of_b.total.mT, grad_weights, grad_y


class _Sum:
    """The gradient of so many slices, added up from those of ranges of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.total = torch.empty(0)

    def add(self, part: Tensor, at: slice) -> None:
        if not len(self.total):
            if len(part) == self.count:
                self.total = part
                return
            self.total = part.new_zeros(self.count, *part.shape[1:])
        self.total[at] += part


def _range(ids: Tensor, count: int = 0) -> slice:
    """All of so many slices, or, if 0, those from the lowest to the highest of ids."""
    if count or not len(ids):
        return slice(0, count)
    first, last = (int(extreme) for extreme in ids.aminmax())
    return slice(first, last + 1)


def _bounds(j: np.ndarray) -> np.ndarray:
    """Where ids begin that are all above those before, as those of a table are; and the end."""
    highest, lowest = np.maximum.accumulate(j), np.minimum.accumulate(j[::-1])[::-1]
    return np.append(np.flatnonzero(highest[:-1] < lowest[1:]) + 1, len(j))


def _pieces(p: Tensor, most_rows: int, bounds: np.ndarray, most_slices: int) -> Iterator[slice]:
    """Ranges of rows, p ascending, that are few enough and meet few enough slices; an empty one if there are no rows.

    They end at bounds, unless these are so far apart or so near that ranges would be too large, or less than half as large.
    """
    first, slices = 0, p.numpy()
    while first < max(1, len(p)):
        beyond = min(first + most_rows, len(p))
        if beyond:
            last = slices[first] + most_slices
            bound = bounds[max(0, np.searchsorted(bounds, last, "right") - 1)]
            last = bound if last - most_slices // 2 <= bound <= last else last
            beyond = max(first + 1, min(beyond, int(np.searchsorted(slices, last))))
        yield slice(first, beyond)
        first = max(beyond, 1)


def _gradients(
    a: Tensor, b_transposed: Tensor, p: Tensor, q: Tensor, starts: Tensor, *lookups: Tensor | int | None
) -> tuple[Tensor, Tensor]:
    """Gradients of a and, transposed, of b.

    The gradient of a row is summed where it stays in cache, and used there for that of a. It is written to memory in the order of q
    and read back for that of b in one stream.
    """
    (P, n1, r), (Q, n2, _) = a.shape, b_transposed.shape
    left, right = sort_both(p, P, q, Q)
    bounds, in_turn = _equal_shares(starts), torch.arange(len(p))
    runs, of_runs, cut = _cut_runs(left.starts.numpy(), bounds.numpy())
    grad_a, grad_b_transposed = torch.empty(P + len(cut), n1, r), torch.empty(Q, n2, r)
    # Where an operand's address is missing, each task puts that of its own rows.
    of_a = gradient_of_a(grad_a, in_turn, b_transposed, torch.from_numpy(runs), in_turn, q)._replace(zs=torch.from_numpy(of_runs))
    tasks = torch.from_numpy(np.searchsorted(runs, bounds.numpy()))
    tasks[-1] = len(of_runs)  # with slices beyond the last row's
    sums = torch.empty(len(p), n1, n2)
    _sum_gradients(_TASKS, bounds, tasks, int(bounds.diff().max()), sums, right.places, *lookups, *of_a)
    run(gradient_of_b(grad_b_transposed, sums, a, right.starts, in_turn, right.others))
    return grad_a[:P].index_add_(0, torch.from_numpy(cut), grad_a[P:]), grad_b_transposed


def _cut_runs(starts: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the runs of rows with one slice of a at the bounds of tasks.

    Returns:
        Where the pieces start and end; the run each is of, or, for all but a run's first piece, a number of its own beyond those of
        the runs; and the run that each of these is of.
    """
    run_of = np.searchsorted(starts, bounds, "right") - 1
    inside = starts[run_of] < bounds
    cut, at = run_of[inside], bounds[inside]
    runs = len(starts) - 1
    of_pieces = np.insert(np.arange(runs), cut + 1, np.arange(runs, runs + len(cut)))
    return np.insert(starts, cut + 1, at), of_pieces, cut


def _chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows that fit the buffer; an empty one if there are no rows."""
    step = max(1, bags.ROW_BUFFER_BYTES // (4 * max(width, 1)))
    return [(first, min(first + step, rows)) for first in range(0, max(rows, 1), step)]


def _without_padding(starts: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the rows that there are, which come first."""
    rows = len(p) if not len(p) or p[-1] >= 0 else int((p >= 0).sum())
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
def _multiply_and_copy(params):  # type: ignore[no-untyped-def]
    """Products of a few rows at a time, copied to all their lookups."""
    bounds, order, starts, places = int64_at(params[2]), int64_at(params[3]), int64_at(params[4]), int64_at(params[5])
    width, streams = params[7], params[7] % WIDTH == 0 and params[6] % (4 * WIDTH) == 0
    products = np.empty(NUMBERS, np.int64)
    for k in range(NUMBERS):
        products[k] = params[8 + k]
    height = max(1, _BLOCK // width)
    rows = np.empty((height, width), np.float32)
    pointer = int64_at(products.ctypes.data)
    task = next_task(params)
    while task < params[1]:
        for first in range(bounds[task], bounds[task + 1], height):
            beyond = min(first + height, bounds[task + 1])
            products[C] = rows.ctypes.data - 4 * width * first
            sum_products(pointer, first, beyond, products[ROWS], products[COLS])
            for u in range(first, beyond):
                for t in range(starts[u], starts[u + 1]):
                    place = params[6] + 4 * places[order[t]]
                    _copy(place, rows.ctypes.data + 4 * width * (u - first), width, streams)
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
    """Gradients of rows; the parts of the gradient of a that they make; and gradients of weights, if there are rows for it."""
    bounds, pieces, sums, target = int64_at(params[2]), int64_at(params[3]), params[5], int64_at(params[6])
    order, starts, places = int64_at(params[7]), int64_at(params[8]), int64_at(params[9])
    factors, grad_weights, width, lookups_in_bags = float32_at(params[10]), float32_at(params[13]), params[14], params[15]
    streams = width % WIDTH == 0 and sums % (4 * WIDTH) == 0
    products = np.empty(NUMBERS, np.int64)
    for k in range(NUMBERS):
        products[k] = params[16 + k]
    rows = np.empty((params[4], width), np.float32)
    task = next_task(params)
    while task < params[1]:
        first, beyond = bounds[task], bounds[task + 1]
        last = starts[beyond] - 1  # of this task's lookups
        for u in range(first, beyond):
            out = rows[u - first]
            out[:] = 0
            for t in range(starts[u], starts[u + 1]):
                ahead = places[order[min(t + _AHEAD, last)]]
                for line in range(0, 4 * width, 64):
                    prefetch(params[11] + 4 * ahead + line)
                i = order[t]
                if i >= lookups_in_bags:
                    continue
                grad = carray(float32_at(params[11] + 4 * places[i]), (width,))
                factor = factors[i] if params[10] else np.float32(1)
                for n in range(width):
                    out[n] += factor * grad[n]
                if params[12]:
                    row = carray(float32_at(params[12] + 4 * width * u), (width,))
                    dot = np.float32(0)
                    for n in range(width):
                        dot += grad[n] * row[n]
                    grad_weights[i] = dot
            _copy(sums + 4 * width * target[u], rows.ctypes.data + 4 * width * (u - first), width, streams)
        products[A] = rows.ctypes.data - 4 * width * first
        sum_products(int64_at(products.ctypes.data), pieces[task], pieces[task + 1], products[ROWS], products[COLS])
        task = next_task(params)


@njit(nogil=True, cache=True)
def _copy(target, source, width, streams):  # type: ignore[no-untyped-def]
    if streams:
        stream(target, source, width)
    else:
        out, values = carray(float32_at(target), (width,)), carray(float32_at(source), (width,))
        for n in range(width):
            out[n] = values[n]
