"""Bags of products on CPU, compiled by Numba. Sums run over a row's lookups in their order, so results don't depend on threads.

A place is where a row, or the gradient of one, begins, counted in elements from the first of the bags or of their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops import bags
from comera_rec.ops.gathered_matmul.numba import (
    counting,
    gradients,
    plain,
    run,
    shares,
    sort_by,
)
from comera_rec.ops.plan import LookupPlan
from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task, prefetch
from comera_rec.ops.simd.tile import WIDTH, Products, numbers, stream, sum_products
from comera_rec.ops.stack.numba import FIELDS, IN_CACHE, by_slices, rank_gradients, reorderings, slices, unstack

NUMBERS = len(Products._fields)
C, C_SLICE, A, ROWS, COLS = (Products._fields.index(name) for name in ("c", "c_slice", "a", "rows", "cols"))
_TASKS = 128
_AHEAD = 20  # lookups
_BLOCK = 2048  # floats of rows that wait in cache to be copied


class _Tables:
    """Cores of tables. Slices are counted over all of them; rows, in the order of p, lie table by table.

    Args:
        a: cores (1, P_t, n1, r_t).
        b: cores (r_t, Q_t, n2, 1).
        ranks: diagonals (r_t), or none at all.
        p: of the rows [U], ascending.
        first_p, first_q: the numbers of the first slices.
    """

    def __init__(
        self, a: Sequence[Tensor], b: Sequence[Tensor], ranks: Sequence[Tensor], p: Tensor, first_p: int = 0, first_q: int = 0
    ) -> None:
        self.a, self.b, self.ranks = [plain(core) for core in a], [by_slices(core) for core in b], [plain(rank) for rank in ranks]
        self.n1, self.n2, self.r = a[0].shape[2], b[0].shape[2], np.array([len(core) for core in b])
        self.first_p, self.first_q = (
            np.cumsum([first, *(core.shape[1] for core in cores)]) for first, cores in ((first_p, a), (first_q, b))
        )
        self.rows = np.searchsorted(p.numpy(), self.first_p)

    def require_within(self, p: Tensor, q: Tensor) -> None:
        """An IndexError for a slice that there isn't."""
        for ids, name, count in ((p[-1:], "p", self.first_p[-1]), (q, "q", self.first_q[-1])):
            if len(ids) and (last := int(ids.max())) >= count:
                raise IndexError(f"{name} holds {last}, but there are {count} slices")
        if not _are_within(q.numpy(), self.rows, self.first_q):
            raise IndexError("q holds slices of other tables than p: give a plan for these tables")

    def slices_of_b(self, *, transposed: bool = False) -> list[Tensor]:
        """Per table [Q, r, n2] or, transposed, [Q, n2, r], times the diagonal."""
        return slices(self.b, self.ranks, transposed=transposed)

    def at_a(self, cores: Sequence[Tensor]) -> np.ndarray:
        """Per table where slice 0 of a would be in `cores`, or in what is laid out as they are."""
        return np.array([core.data_ptr() for core in cores]) - 4 * self.first_p[:-1] * self.n1 * self.r

    def at_b(self, slices: Sequence[Tensor]) -> np.ndarray:
        """Per table where slice 0 of b would be in `slices`."""
        return np.array([own.data_ptr() for own in slices]) - 4 * self.first_q[:-1] * self.n2 * self.r

    def products(self, b: Sequence[Tensor], p: Tensor, q: Tensor) -> Products:
        """What makes rows, end to end."""
        one_each = counting(len(p) + 1)
        return Products(
            c=0, c_slice=self.n1 * self.n2, a=self.at_a(self.a), a_slice=self.n1 * self.r, a_row=self.r, a_col=1,
            b=self.at_b(b), b_slice=self.n2 * self.r, starts=one_each, xs=p, ys=q, zs=one_each,
            rows=self.n1, depth=self.r, cols=self.n2,
        )  # fmt: skip

    def make_rows(self, b: Sequence[Tensor], p: Tensor, q: Tensor) -> Tensor:
        """[U, n1, n2]."""
        out = torch.empty(len(p), self.n1, self.n2)
        run(self.products(b, p, q)._replace(c=out), self.rows)
        return out


class Lookups(NamedTuple):
    """The ids of a batch, sorted by row, and the bags they are in; see `LookupPlan` and `pool_products`."""

    p: Tensor
    q: Tensor
    starts: Tensor
    order: Tensor
    offsets: Tensor
    places: Tensor

    def of_rows(self, rows: slice) -> Lookups:
        """Those of some of the rows."""
        return self._replace(p=self.p[rows], q=self.q[rows], starts=self.starts[rows.start : rows.stop + 1])


class _Above(NamedTuple):
    """The gradient of bags, and by what each id's row was multiplied in its bag, if by anything; the gradient of that goes last."""

    grad: Tensor
    scales: Tensor | None
    grad_weights: Tensor


def lookups(p: Tensor, q: Tensor, plan: LookupPlan, offsets: Tensor, features: int, width: int) -> Lookups:
    """Without the plan's padding; a ValueError for offsets that are none."""
    offsets, order = plain(offsets), plain(plan.order)
    if not _ascend(offsets.numpy(), len(order)):
        raise ValueError(f"offsets must ascend from 0 to at most {len(order)}, the number of ids")
    rows = len(p) if not len(p) or p[-1] >= 0 else int((p >= 0).sum())
    places = torch.empty_like(order) if offsets[-1] == len(order) else torch.zeros_like(order)
    _place_lookups(_TASKS, offsets, len(offsets) - 1, features, width, places)
    return Lookups(plain(p[:rows]), plain(q[:rows]), plain(plan.starts[: rows + 1]), order, offsets, places)


def forward(
    a: Sequence[Tensor], b: Sequence[Tensor], ranks: Sequence[Tensor], batch: Lookups, inverse: Tensor, weights: Tensor | None,
    mean: bool, features: int,
) -> Tensor:  # fmt: skip
    """[B, F * N] bags; see `pool_products`."""
    p, q, starts, order, offsets, places = batch
    count, width = len(offsets) - 1, a[0].shape[2] * b[0].shape[2]
    out, tables = torch.empty(count // features, features * width), _Tables(a, b, ranks, p)
    tables.require_within(p, q)
    slices_of_b = tables.slices_of_b()
    if weights is None and len(order) == count and _have_one_each(offsets.numpy()):
        # Rows go from cache straight to their lookups' places.
        (bounds, of), products = shares(starts, tables.rows), numbers(tables.products(slices_of_b, p, q), len(a))
        _multiply_and_copy(len(of), bounds, of, products, order, starts, places, out, width)
        return out
    inverse, weights = plain(inverse), None if weights is None else plain(weights)
    for some in _chunks(len(p), width):
        rows = _Tables(a, b, ranks, p[some]).make_rows(slices_of_b, p[some], q[some])
        _pool(_TASKS, out, rows, inverse, offsets, weights, width, count, features, mean, some.start, some.stop)
        del rows  # before the next ones are made
    return out


def backward(
    grad: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], ranks: Sequence[Tensor], batch: Lookups, weights: Tensor | None,
    mean: bool, factors: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of a or, where that is the product of factors x, y, i and j, of x and y; of b, of ranks; and of the weights."""
    order, offsets, scales = batch.order, batch.offsets, None
    if mean or weights is not None or int(offsets[-1]) < len(order):
        scales = torch.zeros(len(order)) if weights is None else plain(weights).clone()
        _scale_lookups(offsets.numpy(), mean, weights is None, scales.numpy())
    above = _Above(plain(grad), scales, torch.zeros(0 if weights is None else len(order)))
    if factors:
        return _gradients_of_factors(a[0], b[0], factors, batch, above), above.grad_weights
    found: list[Tensor] = []
    for some in _chunks(len(batch.p), a[0].shape[2] * b[0].shape[2]):
        parts = _gradients(_Tables(a, b, ranks, batch.p[some]), batch.of_rows(some), above)
        found = [total.add_(part) for total, part in zip(found, parts, strict=True)] if found else parts
    return found, above.grad_weights


class _Sum:
    """The gradient of a tensor, added up from those of ranges of one axis."""

    def __init__(self, of: Tensor, axis: int) -> None:
        self._shape, self._axis = of.shape, axis
        self.total = torch.empty(0)

    def add(self, part: Tensor, first: int) -> None:
        if self.total.shape != self._shape:
            if part.shape == self._shape:
                self.total = part
                return
            self.total = part.new_zeros(self._shape)
        self.total.narrow(self._axis, first, part.shape[self._axis]).add_(part)


def _gradients_of_factors(a: Tensor, b: Tensor, factors: Sequence[Tensor], batch: Lookups, above: _Above) -> list[Tensor]:
    """Of x, y and b, from slices of a and b in parts that stay in cache."""
    x, y, i, j = factors
    y, modes = y.flatten(2), y.shape[2:]
    of_x, of_y, of_b = _Sum(x, 0), _Sum(y.mT, 0), _Sum(b, 1)
    p, q, most_rows = batch.p, batch.q, max(1, bags.ROW_BUFFER_BYTES // (4 * max(1, a.shape[2] * b.shape[2])))

    def add(some: slice) -> None:
        of_p, of_q = _range(p[some]), _range(q[some])
        tables = _Tables([a[:, of_p]], [b[:, of_q]], [], p[some], of_p.start, of_q.start)
        grad_a, grad_b = _gradients(tables, batch.of_rows(some), above)
        some_i, some_j = plain(i[of_p]), plain(j[of_p])
        of_i, of_j = _range(some_i), _range(some_j)
        grad_a = grad_a.view(len(some_i), x.shape[1], y.shape[2])
        grad_x, grad_y = gradients(grad_a, x[of_i], y[of_j], some_i - of_i.start, some_j - of_j.start)
        of_x.add(grad_x, of_i.start)
        of_y.add(grad_y, of_j.start)
        of_b.add(grad_b, of_q.start)

    for some in _pieces(p, most_rows, _bounds(plain(j[_range(p)]).numpy()), bags.SLICES_AT_ONCE):
        add(some)  # what a piece takes is freed before the next one
    return [of_x.total, of_y.total.mT.unflatten(2, modes), of_b.total]


def _range(ids: Tensor) -> slice:
    """From the lowest to the highest of ids."""
    if not len(ids):
        return slice(0, 0)
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


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Ranges of rows that fit the buffer; an empty one if there are no rows."""
    step = max(1, bags.ROW_BUFFER_BYTES // (4 * max(width, 1)))
    return (slice(first, min(first + step, rows)) for first in range(0, max(rows, 1), step))


def _gradients(tables: _Tables, batch: Lookups, above: _Above) -> list[Tensor]:
    """Gradients of a, b and the diagonals; those of weights are put in their places.

    The gradient of a row is summed where it stays in cache, and used there for that of a. It is written to memory in the order of q
    and read back for that of b in one stream.
    """
    p, q, first_q = batch.p, batch.q, int(tables.first_q[0])
    (by_q,) = sort_by((q - first_q if first_q else q, int(tables.first_q[-1]) - first_q, p))
    b, sums = tables.slices_of_b(transposed=True), torch.empty(len(p), tables.n1 * tables.n2)
    grad_a = _gradients_of_a(tables, batch, above, b, sums, by_q.places)
    of_b = Products(
        c=0, c_slice=tables.n2 * tables.r, a=sums, a_slice=sums.shape[1], a_row=1, a_col=tables.n2,
        b=tables.at_a(tables.a), b_slice=tables.n1 * tables.r, starts=by_q.starts, xs=counting(len(p)), ys=by_q.others,
        zs=counting(len(by_q.starts)), rows=tables.n2, depth=tables.n1, cols=tables.r,
    )  # fmt: skip
    return grad_a + _gradients_of_b(tables, b, of_b)


def _gradients_of_a(
    tables: _Tables, batch: Lookups, above: _Above, b: Sequence[Tensor], sums: Tensor, targets: Tensor
) -> list[Tensor]:
    """And those of rows, [U, N] in the order of their targets; slices of b are transposed."""
    (bounds, of), sizes = shares(batch.starts, tables.rows), tables.n1 * tables.r
    found, cut = [torch.empty(core.shape) for core in tables.a], torch.empty(len(of), int(sizes.max()))
    runs = _cut_runs(batch.p.numpy(), bounds.numpy(), of.numpy(), tables.at_a(found) // 4, sizes, cut.data_ptr() // 4)
    starts, places, first_runs, rest = map(torch.from_numpy, runs)
    if int(first_runs[-1]) - len(rest) < tables.first_p[-1] - tables.first_p[0]:
        for core in found:
            core.zero_()  # of slices that no row has
    rows = tables.make_rows(tables.slices_of_b(), batch.p, batch.q) if len(above.grad_weights) else None
    products = Products(  # of each task's rows, whose address it knows
        c=0, c_slice=1, a=0, a_slice=sums.shape[1], a_row=tables.n2, a_col=1, b=tables.at_b(b), b_slice=tables.n2 * tables.r,
        starts=starts, xs=counting(len(sums)), ys=batch.q, zs=places, rows=tables.n1, depth=tables.n2, cols=tables.r,
    )  # fmt: skip
    tallest = int(bounds.diff().max()) if len(of) else 0
    _sum_gradients(
        len(of), bounds, of, numbers(products, len(found)), first_runs, tallest, sums, targets, batch.order, batch.starts,
        batch.places, above.scales, above.grad, rows, above.grad_weights, sums.shape[1], int(batch.offsets[-1]),
    )  # fmt: skip
    _add_cut(cut.numpy(), rest.numpy())
    return found


def _gradients_of_b(tables: _Tables, transposed: Sequence[Tensor], products: Products) -> list[Tensor]:
    """And of the diagonals. Products lack the place of their sums, which each task knows; slices of b are transposed."""
    found, firsts = [torch.empty(core.shape) for core in tables.b], tables.first_q - tables.first_q[0]
    bounds, of = shares(products.starts, firsts)
    numbered = numbers(products, len(found))
    reordered = reorderings(tables.b, tables.ranks, [own.mT[..., None] for own in transposed], found)
    of_ranks = torch.zeros(len(of), int(tables.r.max()))
    buffer = max(IN_CACHE, tables.n2 * of_ranks.shape[1])
    _multiply_and_reorder(len(of), bounds, of, numbered, reordered, torch.from_numpy(firsts), of_ranks, of_ranks.shape[1], buffer)
    return found + rank_gradients(of_ranks, of, tables.ranks)


@njit(nogil=True, cache=True)
def _are_within(ids, rows, firsts):  # type: ignore[no-untyped-def]
    """Whether the ids of each table's rows are those of its slices."""
    are_within = True
    for table in range(len(rows) - 1):
        for u in range(rows[table], rows[table + 1]):
            are_within &= firsts[table] <= ids[u] < firsts[table + 1]
    return are_within


@njit(nogil=True, cache=True)
def _cut_runs(p, bounds, of, zeroth, sizes, cut):  # type: ignore[no-untyped-def]
    """Cut the runs of rows with one slice of a at the bounds of tasks. Places are counted in floats from address 0.

    Args:
        zeroth: per table the place of the gradient of slice 0.
        sizes: per table the floats of a slice.
        cut: the first place for gradients of all but the first piece of a run, as far apart as the largest slice is long.

    Returns:
        Where pieces start; where their gradients go; the first piece of each task; and per piece that was cut off where the rest
        of its run's gradient is, and how many floats.
    """
    starts, places = np.empty(len(p) + len(of) + 1, np.int64), np.empty(len(p) + len(of), np.int64)
    first, rest = np.empty(len(of) + 1, np.int64), np.empty((len(of), 2), np.int64)
    count, cuts = 0, 0
    for task in range(len(of)):
        size = sizes[of[task]]
        first[task] = count
        for u in range(bounds[task], bounds[task + 1]):
            if u == bounds[task] or p[u] != p[u - 1]:
                starts[count], places[count] = u, zeroth[of[task]] + p[u] * size
                if u > 0 and p[u] == p[u - 1]:
                    rest[cuts, 0], rest[cuts, 1], places[count] = places[count], size, cut + cuts * sizes.max()
                    cuts += 1
                count += 1
    first[len(of)], starts[count] = count, len(p)
    return starts, places, first, rest[:cuts]


@njit(nogil=True, cache=True)
def _add_cut(cut, rest):  # type: ignore[no-untyped-def]
    """Add the gradients of pieces that were cut off to those of their runs."""
    for k in range(len(rest)):
        for n in range(rest[k, 1]):
            float32_at(4 * rest[k, 0])[n] += cut[k, n]


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


@njit(nogil=True, cache=True)
def _load(products, several, number):  # type: ignore[no-untyped-def]
    for k in range(NUMBERS):
        products[k] = int64_at(several)[number * NUMBERS + k]


@kernel
def _multiply_and_copy(params):  # type: ignore[no-untyped-def]
    """Products of a few rows at a time, copied to all their lookups."""
    bounds, of, order, starts, places = (
        int64_at(params[2]), int64_at(params[3]), int64_at(params[5]), int64_at(params[6]), int64_at(params[7])
    )  # fmt: skip
    width, streams = params[9], params[9] % WIDTH == 0 and params[8] % (4 * WIDTH) == 0
    products = np.empty(NUMBERS, np.int64)
    height = max(1, _BLOCK // width)
    rows = np.empty((height, width), np.float32)
    pointer = int64_at(products.ctypes.data)
    task = next_task(params)
    while task < params[1]:
        _load(products, params[4], of[task])
        for first in range(bounds[task], bounds[task + 1], height):
            beyond = min(first + height, bounds[task + 1])
            products[C] = rows.ctypes.data - 4 * width * first
            sum_products(pointer, first, beyond, products[ROWS], products[COLS])
            for u in range(first, beyond):
                for t in range(starts[u], starts[u + 1]):
                    place = params[8] + 4 * places[order[t]]
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
    bounds, of, pieces, sums, target = int64_at(params[2]), int64_at(params[3]), int64_at(params[5]), params[7], int64_at(params[8])
    order, starts, places = int64_at(params[9]), int64_at(params[10]), int64_at(params[11])
    factors, grad_weights, width, lookups_in_bags = float32_at(params[12]), float32_at(params[15]), params[16], params[17]
    streams = width % WIDTH == 0 and sums % (4 * WIDTH) == 0
    products = np.empty(NUMBERS, np.int64)
    rows = np.empty((params[6], width), np.float32)
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
                    prefetch(params[13] + 4 * ahead + line)
                i = order[t]
                if i >= lookups_in_bags:
                    continue
                grad = carray(float32_at(params[13] + 4 * places[i]), (width,))
                factor = factors[i] if params[12] else np.float32(1)
                for n in range(width):
                    out[n] += factor * grad[n]
                if params[14]:
                    row = carray(float32_at(params[14] + 4 * width * u), (width,))
                    dot = np.float32(0)
                    for n in range(width):
                        dot += grad[n] * row[n]
                    grad_weights[i] = dot
            _copy(sums + 4 * width * target[u], rows.ctypes.data + 4 * width * (u - first), width, streams)
        _load(products, params[4], of[task])
        products[A] = rows.ctypes.data - 4 * width * first
        sum_products(int64_at(products.ctypes.data), pieces[task], pieces[task + 1], products[ROWS], products[COLS])
        task = next_task(params)


@kernel
def _multiply_and_reorder(params):  # type: ignore[no-untyped-def]
    """Gradients of a few slices of b at a time, to their places in a core."""
    bounds, of, firsts = int64_at(params[2]), int64_at(params[3]), int64_at(params[6])
    products, slices = np.empty(NUMBERS, np.int64), np.empty(params[9], np.float32)
    task = next_task(params)
    while task < params[1]:
        _load(products, params[4], of[task])
        size, before = products[C_SLICE], firsts[of[task]]
        step = len(slices) // max(1, size)
        for first in range(bounds[task], bounds[task + 1], step):
            beyond = min(first + step, bounds[task + 1])
            products[C] = slices.ctypes.data - 4 * size * first
            sum_products(int64_at(products.ctypes.data), first, beyond, products[ROWS], products[COLS])
            own = int64_at(params[5] + 8 * FIELDS * of[task])
            unstack(own, products[C] + 4 * size * before, first - before, beyond - before, params[7] + 4 * params[8] * task)
        task = next_task(params)


@njit(nogil=True, cache=True)
def _copy(target, source, width, streams):  # type: ignore[no-untyped-def]
    if streams:
        stream(target, source, width)
    else:
        out, values = carray(float32_at(target), (width,)), carray(float32_at(source), (width,))
        for n in range(width):
            out[n] = values[n]
