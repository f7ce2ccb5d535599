"""Verification of a data set against its manifest: files, checksums, vocabularies, ids, labels, and that no row is in two splits.

Each shard records which rows of the input it holds, so a shard that was copied over another one is detected.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.errors import UserError
from data_pipeline.hashing import IdSource, encode_keys, map_array
from data_pipeline.manifest import REMEDY, CategoricalColumn, Manifest, Shard, check_file, check_shards, files_of
from data_pipeline.shards import recorded_rows
from data_pipeline.similarity import band_of

_THREADS = 4
_BANDS = 16  # more than `band_of` has
_Sums = Counter[tuple[str, str]]  # by what was added up in a split, "ids", "zeros" or "targets", and the column


@dataclass(frozen=True, kw_only=True)
class Verified:
    """How much was checked."""

    rows: int
    files: int
    bytes: int


def verify(manifest: Manifest, folder: Path) -> Verified:
    """Read a whole data set and compare it with its manifest.

    Checks each file's size and SHA-256, each shard's rows, that the splits' shards hold every row of the input exactly once, that
    labels, integers and ids are in range, and the sums that the manifest states.

    Raises:
        ValueError: something differs; the message names the file, column and row of the first difference.
    """
    check_shards(manifest, folder)
    _check_disjoint(manifest, folder)
    work = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    sums = {name: _Sums() for name in manifest.splits}
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: _check_contents(manifest, folder, *item), work)
        bar = tqdm(checked, total=len(work), desc="verifying", unit="file", disable=None)
        for (name, _), of_shard in zip(work, bar, strict=True):
            sums[name].update(of_shard)
    _check_sums(manifest, folder, sums)
    for column in manifest.categorical_columns:
        train_ids = sums["train"]["ids", column.name] - sums["train"]["zeros", column.name]
        check_vocabulary(column, folder, train_ids=None if manifest.transformed else train_ids)
    files = list(files_of(manifest))
    return Verified(rows=manifest.rows.written, files=len(files), bytes=sum(file.bytes for file in files))


def _check_disjoint(manifest: Manifest, folder: Path) -> None:
    """Check that the shards' ranges of input rows tile the input, and that the shards of each range together hold all its rows."""
    taken: dict[tuple[int, int], int] = defaultdict(int)
    last_of_split: dict[str, int] = {}
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.from_rows is None:
                raise _differs(folder, f"{shard.path} doesn't say which input rows it holds")
            if shard.from_rows[0] < last_of_split.get(name, 0):
                raise _differs(folder, f"{shard.path} starts before the end of the shard listed before it, or repeats its rows")
            last_of_split[name] = shard.from_rows[1]
            taken[shard.from_rows] += shard.rows
    position = 0
    for (start, stop), rows in sorted(taken.items()):
        if start != position or rows != stop - start:
            raise _differs(folder, f"shards hold {rows} of input rows {start} to {stop}; expected all rows from {position} on")
        position = stop
    if position != manifest.rows.written:
        raise _differs(folder, f"the splits hold {position} of {manifest.rows.written} rows")


def _check_contents(manifest: Manifest, folder: Path, split: str, shard: Shard) -> _Sums:
    path, sums, rows = check_file(shard, folder, contents=True), _Sums(), 0
    if recorded_rows(path) != (split, shard.from_rows):
        raise _differs(folder, f"{shard.path} doesn't hold the rows that the manifest states, but those of another shard")
    for first_row, group in read_row_groups(path):
        rows = first_row + len(group)
        where = f"{path}, rows {first_row} to {rows}"
        for label in manifest.labels:
            values = group.column(label.name).to_numpy()
            sums["targets", label.name] += int(values.sum())
            if not np.isin(values, (0, 1)).all():
                raise UserError(f"{where}: {label.name} holds values other than 0 and 1; {REMEDY}")
        if manifest.weight:
            name, values = manifest.weight.name, group.column(manifest.weight.name).to_numpy()
            sums["targets", name] += values.sum(dtype=np.float64)
            if not (np.isfinite(values) & (values >= 0)).all():
                raise UserError(f"{where}: {name} holds weights that are not finite numbers of at least 0; {REMEDY}")
        for integer in manifest.integer_columns:
            values = group.column(integer.name).to_numpy()
            if not np.isfinite(values).all() or (integer.transform == "log" and (values < 0).any()):
                raise UserError(f"{where}: {integer.name} holds values that are not finite, or negative logarithms; {REMEDY}")
        for column in manifest.categorical_columns:
            cells = group.column(column.name).combine_chunks()
            ids = (cells.flatten() if column.is_list else cells).to_numpy()
            sums["ids", column.name] += len(ids)
            sums["zeros", column.name] += int(np.count_nonzero(ids == 0))
            if len(ids) and not 0 <= ids.min() <= ids.max() < column.num_embeddings:
                raise UserError(f"{where}: {column.name} holds ids that are not in 0..{column.num_embeddings - 1}; {REMEDY}")
    if rows != shard.rows:
        raise UserError(f"{path} has {rows} rows, but the manifest states {shard.rows}; {REMEDY}")
    return sums


def read_row_groups(path: Path) -> Iterator[tuple[int, pa.Table]]:
    """Read a Parquet file's row groups, each with the number of its first row.

    Raises:
        ValueError: the file or a group can't be read.
    """
    row = 0
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, use_threads=False)
                yield row, group
                row += len(group)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}, from row {row} on, cannot be read ({error}); {REMEDY}") from error


def _check_sums(manifest: Manifest, folder: Path, sums: Mapping[str, _Sums]) -> None:
    for column in manifest.categorical_columns:
        for name, stated in column.rows_at_zero.items():
            zeros = sums[name]["zeros", column.name]
            if zeros != stated:
                raise _differs(folder, f"{name} holds id 0 of {column.name} {zeros} times, not {stated}")
    targets = [(label, "{} labels of 1") for label in manifest.labels]
    targets += [(manifest.weight, "weights that sum to {}")] if manifest.weight else []
    for name, split in manifest.splits.items():
        for target, what in targets:
            total, mean = sums[name]["targets", target.name], target.split_means[name]
            if mean is not None and not math.isclose(mean * split.rows, total, rel_tol=1e-9):
                raise _differs(folder, f"{name} holds {what.format(total)}, but the mean of {target.name} is stated as {mean}")


def check_vocabulary(column: CategoricalColumn, folder: Path, *, train_ids: int | None) -> None:
    """Check that a vocabulary lists its ids' values by falling count, if only from band to band, and its table gives these ids.

    Args:
        train_ids: how many ids other than 0 training rows hold; None if the vocabulary is another data set's.

    Raises:
        ValueError: something differs; the message names the first difference.
    """
    if not column.min_count:
        return
    if column.vocabulary is None:
        raise _differs(folder, f"the manifest names no vocabulary of {column.name}")
    path = check_file(column.vocabulary, folder, contents=True)
    if column.vectors:
        check_file(column.vectors, folder, contents=True)
    rows, total, table = 0, 0, None
    previous: tuple[np.ndarray, ...] | None = None  # the last value and its count
    end_of_bands = min((*column.grown, column.num_embeddings)) - 1 if column.order == "similarity" else 0
    least, most = np.full(_BANDS, np.iinfo(np.int64).max), np.zeros(_BANDS, np.int64)  # counts of each band
    for rows, group in read_row_groups(path):
        if group.schema.names != ["value", "count"] or not pa.types.is_unsigned_integer(group.schema.types[0]):
            raise _differs(folder, f"{path.name} is not a vocabulary of values and counts")
        values, counts = (group.column(name).to_numpy() for name in ("value", "count"))
        positions = np.arange(rows, rows + len(values))
        bands = band_of(positions[positions < end_of_bands])
        np.minimum.at(least, bands, counts[: len(bands)])
        np.maximum.at(most, bands, counts[: len(bands)])
        all_values, all_counts = (values, counts) if previous is None else map(np.append, previous, (values, counts))
        falls = (all_counts[1:] < all_counts[:-1]) | ((all_counts[1:] == all_counts[:-1]) & (all_values[1:] > all_values[:-1]))
        may_rise = (positions < end_of_bands) | np.isin(positions, np.array(column.grown) - 1)
        if not (falls | may_rise[len(values) - len(falls) :]).all() or (counts < column.min_count).any():
            raise _differs(folder, f"{path.name}, from id {rows + 1} on, doesn't list values by falling counts")
        previous = values[-1:], counts[-1:]
        total += int(counts.sum())
        table = table or (_open_table(column, folder, values.dtype) if column.table else None)
        if table:
            (ids,), _ = encode_keys([table], values[np.newaxis], np.zeros((1, len(values)), np.bool_))
            if (ids != positions + 1).any():
                raise _differs(folder, f"the table of {column.name} gives its values different ids than {path.name}")
        rows += len(values)
    if (most[1:] > least[:-1]).any():
        raise _differs(folder, f"{path.name} doesn't list values by falling counts from band to band")
    if rows + 1 != column.num_embeddings:
        raise _differs(folder, f"{column.name} has {column.num_embeddings} embeddings, but its vocabulary has {rows} values")
    if train_ids not in (None, total):
        raise _differs(folder, f"training rows hold {train_ids} ids of {column.name}, but its vocabulary counts {total}")


def _open_table(column: CategoricalColumn, folder: Path, dtype: np.dtype) -> IdSource:
    assert column.table
    path = check_file(column.table, folder, contents=True)
    slots, odd = divmod(path.stat().st_size, 2 * dtype.itemsize)
    ids = np.count_nonzero(map_array(path, dtype, (-1, 2))[:, 1]) if not odd else 0
    if odd or ids + 1 != column.num_embeddings or ids >= slots:
        raise _differs(folder, f"{path.name} is not a table of {column.num_embeddings - 1} values")
    return IdSource(path, dtype)


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"{folder}: {what}; {REMEDY}")
