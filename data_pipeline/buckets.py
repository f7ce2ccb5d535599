"""Ranges of numbers as categories: numbers as keys of the same order, and boundaries at the quantiles of what was counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_SIGN = np.uint64(1 << 63)
Counted = tuple[np.ndarray, np.ndarray]  # ascending keys and their counts


def keys_of_numbers(numbers: np.ndarray) -> np.ndarray:
    """Keys in the order of float64 numbers, uint64: the bits, all of them turned where a number is negative, else the sign's."""
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def numbers_of_keys(keys: np.ndarray) -> np.ndarray:
    """The numbers of `keys_of_numbers`, float64."""
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)


def quantiles(values: Iterable[Counted], total: int, buckets: int) -> tuple[float, ...]:
    """Where ranges of about total / buckets values begin, ascending, but for the first; equal values are in one range.

    Args:
        values: keys of numbers, ascending, block by block.
        total: values with their counts.
        buckets: of the ranges, at most.
    """
    ranks = np.arange(1, buckets) * total // buckets  # of the first value of each range but the first, from 0
    before, first_keys = 0, [np.empty(0, np.uint64)]
    for keys, counts in values:
        ends = before + np.cumsum(counts).astype(np.int64)
        if not len(ends):
            continue
        inside = ranks[(ranks >= before) & (ranks < ends[-1])]
        first_keys.append(keys[np.searchsorted(ends, inside, side="right")])
        before = int(ends[-1])
    return tuple(numbers_of_keys(np.unique(np.concatenate(first_keys))).tolist())
