"""Between the passes: sorted runs of values to vocabularies, by training frequency, column by column in bounded memory.

Id 0 = missing, rare or unseen; 1, 2, ... from the most frequent value on, equal counts by value. Neighbouring ids are then alike in
frequency, so hot rows share the leading digits of a tensor-train table.

1. The runs of all parts are merged by ranges of values, each of as many entries as memory allows: a range is cut out of every
   sorted run, sorted as a whole, and counts of equal values are added.
2. Values that are frequent enough go to disk with their counts. A histogram of the counts then tells where each count's ids begin,
   and one more pass over the values gives the ids, as a counting sort does: equal counts stay in the order of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import remove, replacing
from data_pipeline.hashing import allocate, capacity_for, insert, map_array
from data_pipeline.manifest import Shard, describe_file
from data_pipeline.schema import file_name

_BLOCK = 1 << 20
MOST_IDS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """Sorted distinct values of a column in some rows, and how often each occurs; None for rows that don't train."""

    keys: np.ndarray
    counts: np.ndarray | None

    def __getitem__(self, piece: slice) -> Run:
        return Run(keys=self.keys[piece], counts=None if self.counts is None else self.counts[piece])


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A column's vocabulary on disk: the file for people, and the hash table that encodes."""

    distinct: int
    num_embeddings: int
    file: Shard
    table: Shard


def merge_runs(runs: Sequence[Run], *, key_dtype: np.dtype, entries: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All distinct values in ascending order with their training counts, int64, block by block.

    Args:
        runs: of one column.
        key_dtype: of their values.
        entries: of all runs together that may be in memory at a time.
    """
    yield from _merge([run for run in runs if len(run.keys)], 0, 1 << 8 * key_dtype.itemsize, entries)


def _merge(runs: Sequence[Run], low: int, high: int, entries: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not runs:
        return
    if sum(len(run.keys) for run in runs) <= entries or high - low == 1:
        yield _add(runs)
        return
    middle = (low + high) // 2
    cuts = [int(np.searchsorted(run.keys, run.keys.dtype.type(middle))) for run in runs]
    yield from _merge([run[:cut] for run, cut in zip(runs, cuts, strict=True) if cut], low, middle, entries)
    yield from _merge([run[cut:] for run, cut in zip(runs, cuts, strict=True) if cut < len(run.keys)], middle, high, entries)


def _add(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([run.keys for run in runs])
    counts = np.concatenate([np.zeros(len(run.keys), np.uint32) if run.counts is None else run.counts for run in runs])
    if keys.dtype == np.uint32:  # key and count in one word sort in a fraction of an argsort's time
        packed = keys.astype(np.uint64) << np.uint64(32) | counts
        packed.sort()
        keys, counts = (packed >> np.uint64(32)).astype(np.uint32), packed.astype(np.uint32)
    else:
        order = np.argsort(keys)
        keys, counts = keys[order], counts[order]
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(keys[1:] != keys[:-1]) + 1])
    return keys[starts], np.add.reduceat(counts, starts, dtype=np.int64)


def build_vocabulary(
    name: str,
    runs: Sequence[Run],
    *,
    key_dtype: np.dtype,
    min_count: int,
    max_ids: int | None,
    entries: int,
    data: Path,
    work: Path,
) -> Vocabulary:
    """Merge a column's runs; write `data`/vocabulary/<name>.parquet (value and count in id order from 1) and .table, to look up.

    Args:
        name: of the column.
        runs, key_dtype, entries: as for `merge_runs`.
        min_count: values seen fewer times in training get no id.
        max_ids: values that get an id, at most; None for all that are frequent enough.
        data: the data set's folder.
        work: a folder for what is removed in the end.

    Raises:
        ValueError: there are more ids than an int32 holds.
    """
    stem = file_name(name)
    files = [work / f"{stem}.{part}" for part in ("keys", "counts", "keys-by-id", "counts-by-id")]
    distinct = 0
    with files[0].open("wb") as keys_file, files[1].open("wb") as counts_file:
        for keys, counts in merge_runs(runs, key_dtype=key_dtype, entries=entries):
            distinct += len(keys)
            keys_file.write(keys[counts >= min_count].data)  # ndarray.tofile says nothing when the disk is full
            counts_file.write(counts[counts >= min_count].data)
    keys, counts = map_array(files[0], key_dtype), map_array(files[1], np.dtype(np.int64))
    if len(keys) >= MOST_IDS:
        raise ValueError(f"{name} has {len(keys)} values of {min_count} and more rows; raise --min-count {name}={min_count + 1}")

    kept = min(len(keys), max_ids or len(keys))
    keys_by_id = allocate(files[2], key_dtype, (kept,))
    counts_by_id = allocate(files[3], counts.dtype, (kept,))
    path, table = f"vocabulary/{stem}.parquet", f"vocabulary/{stem}.table"
    with replacing(data / table) as beside:
        pairs = allocate(beside, key_dtype, (capacity_for(kept), 2))
        for start, all_ids in _ids_by_count(counts):
            frequent = all_ids <= kept
            block, ids = keys[start : start + len(all_ids)][frequent], all_ids[frequent]
            keys_by_id[ids - 1] = block
            counts_by_id[ids - 1] = counts[start : start + len(all_ids)][frequent]
            insert(pairs, block, ids)
        del pairs
    with replacing(data / path) as beside:
        starts = range(0, kept, _BLOCK)
        blocks = ((keys_by_id[start : start + _BLOCK], counts_by_id[start : start + _BLOCK]) for start in starts)
        write_vocabulary(beside, blocks, key_dtype=key_dtype)
    found = Vocabulary(
        distinct=distinct,
        num_embeddings=kept + 1,
        file=describe_file(path, data, rows=kept),
        table=describe_file(table, data, rows=kept),
    )
    del keys, counts, keys_by_id, counts_by_id
    for file in files:
        remove(file)
    return found


def _ids_by_count(counts: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """For blocks of counts in the order of their values: where the block begins, and its ids from 1, higher counts first."""
    classes = _ascending_classes(counts)
    sizes = np.zeros(len(classes), np.int64)
    for start in range(0, len(counts), _BLOCK):
        sizes += np.bincount(np.searchsorted(classes, counts[start : start + _BLOCK]), minlength=len(classes))
    next_id = 1 + np.cumsum(sizes[::-1])[::-1] - sizes  # ids of higher counts come before
    for start in range(0, len(counts), _BLOCK):
        found = np.searchsorted(classes, counts[start : start + _BLOCK])
        order = np.argsort(found, kind="stable")
        ordered = found[order]
        ids = np.empty(len(found), np.int64)
        ids[order] = next_id[ordered] + np.arange(len(found)) - np.searchsorted(ordered, ordered)
        next_id += np.bincount(found, minlength=len(classes))
        yield start, ids


def _ascending_classes(counts: np.ndarray) -> np.ndarray:
    """The distinct counts; n rows have at most sqrt(2 n) of them."""
    classes = np.empty(0, np.int64)
    for start in range(0, len(counts), _BLOCK):
        classes = np.union1d(classes, counts[start : start + _BLOCK])
    return classes


def write_vocabulary(path: Path, blocks: Iterable[tuple[np.ndarray, np.ndarray]], *, key_dtype: np.dtype) -> None:
    """Write values and counts, in id order from 1."""
    schema = pa.schema([("value", pa.from_numpy_dtype(key_dtype)), ("count", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for keys, counts in blocks:
            writer.write_table(pa.table([pa.array(keys), pa.array(counts)], schema=schema))
