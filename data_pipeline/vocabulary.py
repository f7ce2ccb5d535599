"""Between the passes: builds vocabularies ordered by training frequency from sorted runs, column by column in bounded memory.

Id 0 = missing, rare or unseen; 1, 2, ... from the most frequent value on, equal counts by value. Neighboring ids then have similar
frequencies, so frequent rows share leading digits in a TT table.

1. The runs of all parts are merged (`data_pipeline.runs`), in levels if there are many.
2. Values that are frequent enough are written to disk with their counts. A histogram of the counts then gives the first id of each
   count, and another pass over the values assigns ids by counting sort, so that equal counts stay in the order of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.arrow import to_arrow
from data_pipeline.atomic import remove, replacing
from data_pipeline.errors import UserError
from data_pipeline.hashing import allocate, release, write_table
from data_pipeline.manifest import Shard, describe_file
from data_pipeline.runs import Counted
from data_pipeline.schema import file_name

_BLOCK = 1 << 20
MOST_IDS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Values from the most frequent on, equal counts by value.

    distinct: the number of values, rare ones included.
    rows: the number of values that are kept.
    """

    distinct: int
    keys: _File
    counts: _File

    @property
    def rows(self) -> int:
        return len(self.keys)

    def blocks(self) -> Iterator[Counted]:
        """Yield keys and counts, block by block."""
        return zip(self.keys.blocks(), self.counts.blocks(), strict=True)


@contextmanager
def ranked(
    name: str, values: Iterable[Counted], *, key_dtype: np.dtype, min_count: int, most: int | None, work: Path
) -> Iterator[Ranked]:
    """Yield a column's frequent values, which stay on disk until the block ends.

    Args:
        values: distinct keys, ascending, with their counts, block by block.
        min_count: values seen fewer times in training are left out.
        most: the most values to keep; None for all.
        work: a folder for temporary files.

    Raises:
        ValueError: there are more ids than an int32 can hold.
    """
    keys, counts, keys_by_id, counts_by_id = files = [
        _File(work / f"{file_name(name)}.{part}", key_dtype if part.startswith("keys") else np.dtype(np.int64))
        for part in ("keys", "counts", "keys-by-id", "counts-by-id")
    ]
    distinct = 0
    with keys.path.open("wb") as keys_file, counts.path.open("wb") as counts_file:
        for block, block_counts in values:
            distinct += len(block)
            keys_file.write(block[block_counts >= min_count].data)  # ndarray.tofile ignores a full disk
            counts_file.write(block_counts[block_counts >= min_count].data)
    kept = len(keys) if most is None else min(len(keys), most)
    if kept >= MOST_IDS:
        raise UserError(f"{name} has {kept} values with at least {min_count} rows; raise `min_count` {name}={min_count + 1}")
    _order_by_id(keys, counts, keys_by_id, counts_by_id, kept)
    yield Ranked(distinct=distinct, keys=keys_by_id, counts=counts_by_id)
    for file in files:
        remove(file.path)


def write_vocabulary(
    name: str, blocks: Callable[[], Iterable[Counted]], rows: int, *, key_dtype: np.dtype, data: Path
) -> tuple[Shard, Shard]:
    """Write `data`/vocabulary/<name>.parquet (value and count in id order from 1) and .table (the hash table for encoding).

    Args:
        blocks: returns values and counts in id order from 1; it is called several times.
    """
    path, table = (f"vocabulary/{file_name(name)}.{suffix}" for suffix in ("parquet", "table"))
    with replacing(data / table) as temporary:
        write_table(temporary, lambda: (keys for keys, _ in blocks()), rows, key_dtype)
    schema = pa.schema([("value", pa.from_numpy_dtype(key_dtype)), ("count", pa.int64())])
    with replacing(data / path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for columns in blocks():
            writer.write_table(pa.Table.from_arrays([to_arrow(column) for column in columns], schema=schema))
    return describe_file(path, data, rows=rows), describe_file(table, data, rows=rows)


@dataclass(frozen=True)
class _File:
    """An array in a file, read block by block."""

    path: Path
    dtype: np.dtype

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield at least one block, which may be empty."""
        for start in range(0, max(len(self), 1), _BLOCK):
            yield np.fromfile(self.path, self.dtype, _BLOCK, offset=start * self.dtype.itemsize)


def _order_by_id(keys: _File, counts: _File, keys_by_id: _File, counts_by_id: _File, kept: int) -> None:
    ordered = [allocate(file.path, file.dtype, (kept,)) for file in (keys_by_id, counts_by_id)]
    for ids, block, block_counts in zip(_ids_by_count(counts), keys.blocks(), counts.blocks(), strict=True):
        for array, values in zip(ordered, (block, block_counts), strict=True):
            array[ids[ids <= kept] - 1] = values[ids <= kept]
            release(array)


def _ids_by_count(counts: _File) -> Iterator[np.ndarray]:
    """Yield the ids of each block of counts: from 1 for the highest count, equal counts in the order of their values."""
    classes = np.empty(0, np.int64)  # n rows have at most sqrt(2 n) distinct counts
    for block in counts.blocks():
        classes = np.union1d(classes, block)
    sizes = np.zeros(len(classes), np.int64)
    for block in counts.blocks():
        sizes += np.bincount(np.searchsorted(classes, block), minlength=len(classes))
    next_id = 1 + np.cumsum(sizes[::-1])[::-1] - sizes  # higher counts get lower ids
    for block in counts.blocks():
        class_of = np.searchsorted(classes, block)
        order = np.argsort(class_of, kind="stable")
        ordered = class_of[order]
        ids = np.empty(len(class_of), np.int64)
        ids[order] = next_id[ordered] + np.arange(len(class_of)) - np.searchsorted(ordered, ordered)
        next_id += np.bincount(class_of, minlength=len(classes))
        yield ids
