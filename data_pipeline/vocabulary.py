"""Between the passes: sorted runs of values to vocabularies, by training frequency, column by column in bounded memory.

Id 0 = missing, rare or unseen; 1, 2, ... from the most frequent value on, equal counts by value. Neighbouring ids are then alike in
frequency, so hot rows share the leading digits of a tensor-train table.

1. The runs of all parts are merged (`data_pipeline.runs`), in levels where they are many.
2. Values that are frequent enough go to disk with their counts. A histogram of the counts then tells where each count's ids begin,
   and one more pass over the values gives the ids, as a counting sort does: equal counts stay in the order of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.arrow import to_arrow
from data_pipeline.atomic import remove, replacing
from data_pipeline.hashing import allocate, release, write_table
from data_pipeline.manifest import Shard, describe_file
from data_pipeline.runs import Counted

_BLOCK = 1 << 20
MOST_IDS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A column's vocabulary on disk: the file for people, and the hash table that encodes."""

    distinct: int
    num_embeddings: int
    file: Shard
    table: Shard


def build_vocabulary(
    name: str, values: Iterable[Counted], *, key_dtype: np.dtype, min_count: int, data: Path, work: Path
) -> Vocabulary:
    """Write `data`/vocabulary/<name>.parquet (value and count in id order from 1) and .table, to look up.

    Args:
        name: of the column.
        values: distinct, ascending, block by block.
        key_dtype: of them.
        min_count: values seen fewer times in training get no id.
        data: the data set's folder.
        work: a folder for what is removed in the end.

    Raises:
        ValueError: there are more ids than an int32 holds.
    """
    keys, counts, keys_by_id, counts_by_id = (
        _File(work / f"{name}.{part}", key_dtype if part.startswith("keys") else np.dtype(np.int64))
        for part in ("keys", "counts", "keys-by-id", "counts-by-id")
    )
    distinct = 0
    with keys.path.open("wb") as keys_file, counts.path.open("wb") as counts_file:
        for block, of_block in values:
            distinct += len(block)
            keys_file.write(block[of_block >= min_count].data)  # ndarray.tofile says nothing when the disk is full
            counts_file.write(of_block[of_block >= min_count].data)
    ids = len(keys)
    if ids >= MOST_IDS:
        raise ValueError(f"{name} has {ids} values of {min_count} and more rows; raise --min-count {name}={min_count + 1}")
    _order_by_id(keys, counts, keys_by_id, counts_by_id)
    path, table = f"vocabulary/{name}.parquet", f"vocabulary/{name}.table"
    with replacing(data / table) as beside:
        write_table(beside, keys_by_id.blocks, ids, key_dtype)
    with replacing(data / path) as beside:
        _write_vocabulary(beside, keys_by_id, counts_by_id)
    for file in (keys, counts, keys_by_id, counts_by_id):
        remove(file.path)
    return Vocabulary(
        distinct=distinct,
        num_embeddings=ids + 1,
        file=describe_file(path, data, rows=ids),
        table=describe_file(table, data, rows=ids),
    )


@dataclass(frozen=True)
class _File:
    """An array in a file, read block by block."""

    path: Path
    dtype: np.dtype

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def blocks(self) -> Iterator[np.ndarray]:
        """One at least."""
        for start in range(0, max(len(self), 1), _BLOCK):
            yield np.fromfile(self.path, self.dtype, _BLOCK, offset=start * self.dtype.itemsize)


def _order_by_id(keys: _File, counts: _File, keys_by_id: _File, counts_by_id: _File) -> None:
    ordered = [allocate(file.path, file.dtype, (len(keys),)) for file in (keys_by_id, counts_by_id)]
    for ids, block, of_block in zip(_ids_by_count(counts), keys.blocks(), counts.blocks(), strict=True):
        for array, values in zip(ordered, (block, of_block), strict=True):
            array[ids - 1] = values
            release(array)


def _ids_by_count(counts: _File) -> Iterator[np.ndarray]:
    """For blocks of counts in the order of their values, their ids from 1, higher counts first."""
    classes = np.empty(0, np.int64)  # n rows have at most sqrt(2 n) distinct counts
    for block in counts.blocks():
        classes = np.union1d(classes, block)
    sizes = np.zeros(len(classes), np.int64)
    for block in counts.blocks():
        sizes += np.bincount(np.searchsorted(classes, block), minlength=len(classes))
    next_id = 1 + np.cumsum(sizes[::-1])[::-1] - sizes  # ids of higher counts come before
    for block in counts.blocks():
        found = np.searchsorted(classes, block)
        order = np.argsort(found, kind="stable")
        ordered = found[order]
        ids = np.empty(len(found), np.int64)
        ids[order] = next_id[ordered] + np.arange(len(found)) - np.searchsorted(ordered, ordered)
        next_id += np.bincount(found, minlength=len(classes))
        yield ids


def _write_vocabulary(path: Path, keys: _File, counts: _File) -> None:
    schema = pa.schema([("value", pa.from_numpy_dtype(keys.dtype)), ("count", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for columns in zip(keys.blocks(), counts.blocks(), strict=True):
            writer.write_table(pa.Table.from_arrays([to_arrow(column) for column in columns], schema=schema))
