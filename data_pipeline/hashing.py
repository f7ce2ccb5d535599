"""Ids of category values, from hash tables in files or from hashes alone; compiled loops do the work.

A table is an array [capacity, 2] of (key, id) with linear probing; a slot is free if its id is 0. It is mapped into memory, so
all workers share one copy, and a table larger than memory still works, with its hot keys in the page cache.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline import native
from data_pipeline.native import Array, Matrix

_RANGE_BYTES = 128 << 20  # written at a time; it determines the order of insertion and so the bytes of the file


def allocate(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """Map a new file of zeros into memory. A full disk raises OSError here, not when the array is written."""
    with path.open("wb") as file:
        if length:
            os.posix_fallocate(file.fileno(), 0, length * dtype.itemsize)
    return map_array(path, dtype, writable=True)


def map_array(path: Path, dtype: np.dtype, *, writable: bool = False) -> np.ndarray:
    """Map a file as an array; pages are read on first access."""
    if not path.stat().st_size:  # empty files cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r+" if writable else "r")


def release(array: np.ndarray) -> None:
    """Release the pages of a mapped file, which count as this process's memory; the file keeps what was written."""
    native.release_pages(Array(array.view(np.uint8), np.uint8))


def write_table(path: Path, blocks: Callable[[], Iterable[np.ndarray]], keys: int, dtype: np.dtype) -> None:
    """Write a table of keys with ids 1, 2, ... in bounded memory.

    Args:
        blocks: returns the keys in id order; it is called several times.
    """
    slots = keys * 3 // 2 + 1  # a third stays free to keep probes short
    pairs, step = allocate(path, dtype, 2 * slots), _RANGE_BYTES // (2 * dtype.itemsize)
    for first_slot in range(0, slots, step):
        first_id = 1
        for block in blocks():
            native.insert[dtype](Array(pairs, dtype), Array(block, dtype), first_id, first_slot, first_slot + step)
            first_id += len(block)
        release(pairs)


class IdSource(ctypes.Structure):
    """Gives ids by a table in a file, 0 for unknown keys, or by hashes alone: 1..buckets - 1; `IdSource` of encode.cpp.

    Pickling stores the arguments, not the table's contents.

    Args:
        room: the most bytes of the table that a thread may hold in memory.
        buckets: 0 if there is a table.
    """

    _fields_ = (("pairs", Array), ("room", ctypes.c_int64), ("buckets", ctypes.c_int64))

    def __init__(
        self, table: Path | None = None, dtype: npt.DTypeLike = np.uint64, room: int = sys.maxsize, buckets: int = 0
    ) -> None:
        self._arguments = (table, dtype, room, buckets)
        self._kept = map_array(table, np.dtype(dtype)) if table else np.empty(0, dtype)
        super().__init__(Array(self._kept, dtype), room, buckets)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return IdSource, self._arguments


_ID_SOURCE = np.dtype(IdSource)  # takes 70 us to make


def shares(sizes: Sequence[int], room: int) -> list[int]:
    """Divide room among those that need the given sizes: all that the smallest need, and equal parts for the others."""
    given = [0] * len(sizes)
    for waiting, number in zip(range(len(sizes), 0, -1), sorted(range(len(sizes)), key=sizes.__getitem__), strict=True):
        given[number] = min(sizes[number], room // waiting)
        room -= given[number]
    return given


def encode_keys(id_sources: Sequence[IdSource], keys: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 [C, n] for keys [C, n], 0 where missing or unknown, and how many in each column are 0, int64 [C]."""
    ids, zeros, dtype = np.empty(keys.shape, np.int32), np.empty(len(keys), np.int64), keys.dtype
    columns: Any = (IdSource * len(id_sources))(*id_sources)
    arrays = (Matrix(keys, dtype), Matrix(missing, np.bool_), Matrix(ids, np.int32), Array(zeros, np.int64))
    native.encode_keys[dtype](Array(np.frombuffer(columns, _ID_SOURCE), _ID_SOURCE), *arrays)
    return ids, zeros
