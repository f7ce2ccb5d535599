"""Ids of category values: hash tables in files, built and looked up by compiled loops, and ids by hash alone.

A table is an array [capacity, 2] of (key, id), free where the id is 0, open to the next slot. It is mapped into memory, so all
workers share one copy, and one larger than memory is still looked up, from the page cache where its hot keys are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np


def allocate(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array of zeros in a new file, mapped into memory; raises OSError here, not later, where the disk has no room for it."""
    size = int(np.prod(shape)) * dtype.itemsize
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    return map_array(path, dtype, shape, writable=True)


def map_array(path: Path, dtype: np.dtype, shape: tuple[int, ...] = (-1,), *, writable: bool = False) -> np.ndarray:
    """A file as an array; pages are read as they are touched."""
    if not path.stat().st_size:  # no system maps nothing
        return np.empty([max(length, 0) for length in shape], dtype)
    return np.memmap(path, dtype, "r+" if writable else "r").reshape(shape)


def capacity_for(keys: int) -> int:
    """Slots of a table: a third stays free, for short probes."""
    return keys * 3 // 2 + 1


@numba.njit(nogil=True, cache=True, inline="always")
def _slot(key, slots):  # type: ignore[no-untyped-def]
    """0..slots - 1 by the upper half of a product: Fibonacci hashing (Knuth, TAOCP 3, section 6.4), cheap and good enough to probe.

    A slot is a range of hashes, so any number of slots will do.
    """
    x = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.uint64(((x >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def insert(table, keys, ids):  # type: ignore[no-untyped-def]
    """Put keys, none of them in the table yet, with ids from 1 into free slots."""
    slots = np.uint64(len(table))
    for i in range(len(keys)):
        slot = _slot(keys[i], slots)
        while table[slot, 1] != 0:
            slot += np.uint64(1)
            if slot == slots:
                slot = np.uint64(0)
        table[slot, 0] = keys[i]
        table[slot, 1] = ids[i]


@numba.njit(nogil=True, cache=True)
def look_up(table, keys, missing, ids):  # type: ignore[no-untyped-def]
    """Fill ids, 0 where a key is missing or not in the table, and return how many are 0."""
    slots, zeros = np.uint64(len(table)), 0
    for i in range(len(keys)):
        key = keys[i]
        slot = _slot(key, slots)
        while True:
            found = table[slot, 1]
            if table[slot, 0] == key or found == 0:
                break
            slot += np.uint64(1)
            if slot == slots:
                slot = np.uint64(0)
        ids[i] = 0 if missing[i] else found
        zeros += ids[i] == 0
    return zeros


@numba.njit(nogil=True, cache=True)
def hash_keys(buckets, keys, missing, ids):  # type: ignore[no-untyped-def]
    """Fill ids 1..buckets - 1 by splitmix64's finalizer alone, 0 where a key is missing, and return how many are 0."""
    zeros = 0
    for i in range(len(keys)):
        x = np.uint64(keys[i]) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = ((x >> np.uint64(32)) * np.uint64(buckets - 1)) >> np.uint64(32)
        ids[i] = 0 if missing[i] else 1 + np.int32(x)
        zeros += ids[i] == 0
    return zeros


class TableIds:
    """Ids by a table in a file, 0 for keys that are not in it. Pickled, it is the name of the file."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._arguments = (path, dtype)
        self._table = np.asarray(map_array(path, dtype, (-1, 2)))  # no subclass, of which compiled loops ask more

    def __call__(self, keys: np.ndarray, missing: np.ndarray, ids: np.ndarray) -> int:
        """Fill ids, and return how many are 0."""
        return int(look_up(self._table, keys, missing, ids))

    def __reduce__(self) -> tuple[type, tuple[Path, np.dtype]]:
        return TableIds, self._arguments


@dataclass(frozen=True)
class HashedIds:
    """Ids 1..buckets - 1 by hash alone."""

    buckets: int

    def __call__(self, keys: np.ndarray, missing: np.ndarray, ids: np.ndarray) -> int:
        """Fill ids, 0 where a key is missing, and return how many are 0."""
        return int(hash_keys(self.buckets, keys, missing, ids))
