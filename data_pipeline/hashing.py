"""Ids of category values: hash tables in files, built and looked up by compiled loops, and ids by hash alone.

A table is an array [capacity, 2] of (key, id), free where the id is 0, open to the next slot. It is mapped into memory, so all
workers share one copy, and one larger than memory is still looked up, from the page cache where its hot keys are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline import native
from data_pipeline.native import Array, IdsOf, Matrix


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


def insert(pairs: np.ndarray, keys: np.ndarray, ids: np.ndarray) -> None:
    """Put keys, none of them in the table yet, with int64 ids from 1 into free slots."""
    native.insert[keys.dtype](Array(pairs, keys.dtype), Array(keys, keys.dtype), Array(ids, np.int64))


class TableIds:
    """Ids by a table in a file, 0 for keys that are not in it. Pickled, it is the name of the file."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._arguments = (path, dtype)
        self._pairs = map_array(path, dtype)
        self.native = IdsOf(Array(self._pairs, dtype), 0)

    def __reduce__(self) -> tuple[type, tuple[Path, np.dtype]]:
        return TableIds, self._arguments


class HashedIds:
    """Ids 1..buckets - 1 by hash alone."""

    def __init__(self, buckets: int) -> None:
        self._arguments = (buckets,)
        self.native = IdsOf(buckets=buckets)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return HashedIds, self._arguments


def encode_keys(ids_of: Sequence[TableIds | HashedIds], keys: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids of categorical columns, int32 [C, n] for keys [C, n], 0 where missing or unknown; and how many are 0, int64 [C]."""
    ids, zeros, dtype = np.empty(keys.shape, np.int32), np.empty(len(keys), np.int64), keys.dtype
    columns = IdsOf.array([of_column.native for of_column in ids_of])
    arrays = (Matrix(keys, dtype), Matrix(missing, np.bool_), Matrix(ids, np.int32), Array(zeros, np.int64))
    native.encode_keys[dtype](columns, *arrays)
    return ids, zeros
