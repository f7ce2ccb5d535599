"""Numeric ranges as categories: order-preserving integer keys of numbers, and boundaries at quantiles of the counted values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_SIGN = np.uint64(1 << 63)
Counted = tuple[np.ndarray, np.ndarray]  # ascending keys and their uint64 counts


def keys_of_numbers(numbers: np.ndarray) -> np.ndarray:
    """Map float64 numbers to uint64 keys of the same order: all bits are flipped in negative numbers, else only the sign bit."""
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def numbers_of_keys(keys: np.ndarray) -> np.ndarray:
    """Invert `keys_of_numbers`."""
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)


def quantiles(values: Iterable[Counted], total: int, buckets: int) -> tuple[float, ...]:
    """Return the ascending boundaries between ranges of about total / buckets values each; equal values share a range.

    Args:
        values: keys of numbers, ascending, block by block.
    """
    ranks = np.arange(1, buckets) * total // buckets  # of each range's first value, from 0; the first range is left out
    before, first_keys = 0, [np.empty(0, np.uint64)]
    for keys, counts in values:
        ends = before + np.cumsum(counts).astype(np.int64)
        if not len(ends):
            continue
        inside = ranks[(ranks >= before) & (ranks < ends[-1])]
        first_keys.append(keys[np.searchsorted(ends, inside, side="right")])
        before = int(ends[-1])
    return tuple(numbers_of_keys(np.unique(np.concatenate(first_keys))).tolist())
