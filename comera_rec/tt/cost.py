"""Predicted cost of a training step over a TT table: counted work times measured prices.

The counts follow how `comera_rec.ops` computes on CPU: the unique rows of a batch are products of slices n1 x r and r x n2. With
3 or 4 cores, one or both of these are products themselves, of the unique leading or trailing digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_VECTOR = 16  # floats; fixed, so that a shape does not depend on the machine that chose it
_LINE = 16  # floats
_CACHE_BYTES = 1_000_000  # private to a CPU core


class Work(NamedTuple):
    """Amounts of each kind of work, or the price of one unit of each."""

    multiplies: float
    """Multiply-adds, counted in whole vectors: the last of a row may be partly empty."""
    tile_steps: float
    """Rows of operands read into tiles of up to 8 rows; they dominate where tiles are small."""
    missed_bytes: float
    """Bytes gathered from right slices that the cache can't hold."""
    slice_numbers: float
    """Numbers in both operands of products, whether or not the batch uses them: transposed copies, gradients."""
    lines: float
    """Cache lines that stacking touches one by one, because only the first core's slices are contiguous."""
    params: float
    """Parameters that are stacked, given a gradient and updated."""
    row_numbers: float
    """Numbers in unique rows."""
    calls: float
    """Levels of products."""
    steps: float
    """1: the part of a step's time that doesn't depend on the shape."""


NANOSECONDS = Work(
    multiplies=0.00458,
    tile_steps=0.651,
    missed_bytes=0.0112,
    slice_numbers=1.56,
    lines=5.2,
    params=0.565,
    row_numbers=1.15,
    calls=548_000,
    steps=798_000,
)
"""Fitted to measured steps of random shapes on two cores of an AMD EPYC with AVX-512 and 1 MiB of L2 cache each. Only their
proportions matter to the choice of a shape."""


@dataclass(frozen=True, kw_only=True)
class LookupCost:
    """Prediction of the time of a training step over one table: forward, backward and a dense Adagrad update.

    Args:
        prices: nanoseconds for a unit of each kind of work.
        lookups: ids in a batch.
        exponent: exponent of the Zipf's law that ids follow, id 0 being the most frequent; not 1.
    """

    prices: Work = NANOSECONDS
    lookups: int = 16_384
    exponent: float = 1.05

    def milliseconds(self, row_shape: Sequence[int], col_shape: Sequence[int], ranks: Sequence[int]) -> float:
        """Predict the milliseconds of a step; arguments as in `TTShape`."""
        work = self.work(row_shape, col_shape, ranks)
        return sum(price * amount for price, amount in zip(self.prices, work, strict=True)) / 1e6

    def work(self, row_shape: Sequence[int], col_shape: Sequence[int], ranks: Sequence[int]) -> Work:
        """Count the work of a step over a table of 2 to 4 cores."""
        bonds = (1, *ranks, 1)
        cores = list(zip(bonds[:-1], row_shape, col_shape, bonds[1:], strict=True))
        rows = _leading_parts(math.prod(row_shape), 1, self.lookups, self.exponent)
        products = list(self._products(row_shape, col_shape, bonds, rows))
        sums = [each for product in products for each in product.sums()]
        return Work(
            multiplies=sum(terms * depth * height * -(-width // _VECTOR) for terms, height, depth, width in sums),
            tile_steps=sum(terms * depth * _tiles(height, width) for terms, height, depth, width in sums),
            missed_bytes=sum(product.missed_bytes() for product in products),
            slice_numbers=sum(product.r * (product.lefts * product.n1 + product.rights * product.n2) for product in products),
            lines=sum(left * m * -(-n * right // _LINE) for left, m, n, right in cores[1:]),
            params=sum(map(math.prod, cores)),
            row_numbers=rows * math.prod(col_shape),
            calls=len(products),
            steps=1,
        )

    def _products(self, m: Sequence[int], n: Sequence[int], bonds: Sequence[int], rows: float) -> Iterator[_Product]:
        """Yield the products of each level, with cores cut as `comera_rec.ops.plan` does."""
        cut, size = (len(m) + 1) // 2, math.prod(m)
        trailing = math.prod(m[cut:])
        lefts, rights = float(m[0]), float(m[-1])
        if len(m) > 2:
            lefts = _leading_parts(size, trailing, self.lookups, self.exponent)
            yield _Product(lefts, m[0], m[1], n[0], bonds[1], n[1] * bonds[2])
        if len(m) == 4:
            rights = _trailing_parts(size, trailing, self.lookups, self.exponent)
            yield _Product(rights, m[2], m[3], bonds[2] * n[2], bonds[3], n[3])
        yield _Product(rows, lefts, rights, math.prod(n[:cut]), bonds[cut], math.prod(n[cut:]))


class _Product(NamedTuple):
    """Products of slices n1 x r and r x n2: their number, and how many different left and right slices they use."""

    products: float
    lefts: float
    rights: float
    n1: int
    r: int
    n2: int

    def sums(self) -> Iterator[tuple[float, int, int, int]]:
        """Yield (terms, height, depth, width) of the products, then of the gradients of their left and right slices."""
        yield self.products, self.n1, self.r, self.n2
        yield self.products, self.n1, self.n2, self.r
        yield self.products, self.r, self.n1, self.n2

    def missed_bytes(self) -> float:
        """Count the bytes of right slices that miss the cache: they are gathered twice for every 8 rows of the left slice."""
        gathered = 2 * self.products * 4 * self.r * self.n2 * -(-self.n1 // 8)
        return gathered * max(0.0, 1 - _CACHE_BYTES / (4 * self.rights * self.r * self.n2))


def _tiles(height: int, width: int) -> int:
    """Count the tiles of a result: up to 8 rows of one or two vectors, or 4 rows of four."""
    vectors = -(-width // _VECTOR)
    rows, together = (8, min(vectors, 2)) if vectors < 4 else (4, 4)
    return -(-height // rows) * -(-vectors // together)


@lru_cache(maxsize=4096)
def _leading_parts(rows: int, block: int, lookups: int, exponent: float) -> float:
    """Return the expected number of blocks of neighboring rows that a batch asks for."""
    edges = _edges(-(-rows // block))
    return _expected_distinct(edges, np.diff(_share(np.minimum(edges * block, rows), rows, exponent)), lookups)


@lru_cache(maxsize=4096)
def _trailing_parts(rows: int, period: int, lookups: int, exponent: float) -> float:
    """Return the expected number of remainders modulo `period` in a batch, with rows after the first period spread evenly."""
    edges = _edges(period)
    first = _share(edges, rows, exponent)
    return _expected_distinct(edges, np.diff(first) + (1 - first[-1]) * np.diff(edges) / period, lookups)


def _edges(count: int) -> np.ndarray:
    """Cut 0..count into intervals that widen by about a tenth."""
    widening = np.exp(np.arange(0, math.log(count + 1), 0.1)).astype(np.int64) - 1
    return np.append(widening[np.diff(widening, prepend=-1) > 0], count)


def _share(before: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """Return the share of lookups whose id is below `before`, by Zipf's law: the integral of (id + 1/2)^-exponent."""
    integral = (before + 0.5) ** (1 - exponent) - 0.5 ** (1 - exponent)
    return integral / ((rows + 0.5) ** (1 - exponent) - 0.5 ** (1 - exponent))


def _expected_distinct(edges: np.ndarray, share: np.ndarray, lookups: int) -> float:
    """Return the expected number of different items in a batch, from the share of lookups of each interval of items."""
    count = np.diff(edges)
    return float((count * -np.expm1(-lookups * share / count)).sum())
