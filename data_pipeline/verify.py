"""Verification of a data set against its manifest: files, checksums, vocabularies, ids, labels, and that no row is in two splits.

Each shard records which rows of the input it holds, so a shard that was copied over another one is detected.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.errors import UserError
from data_pipeline.hashing import TableIds, encode_keys, map_array
from data_pipeline.manifest import REMEDY, CategoricalColumn, Manifest, Shard, check_file, check_shards, files_of
from data_pipeline.shards import recorded_rows
from data_pipeline.similarity import band_of

_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Verified:
    """How much was checked."""

    rows: int
    files: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """Contents of a shard: by column how many ids it has and how many are 0, and sums of labels and weights."""

    ids: Counter[str]
    zeros: Counter[str]
    positives: Counter[str]
    weight: float


def verify(manifest: Manifest, folder: Path) -> Verified:
    """Read a whole data set and compare it with its manifest.

    Checks each file's size and SHA-256, each shard's rows, that the splits' shards hold every row of the input exactly once, that
    labels, integers and ids are in range, and the sums that the manifest states.

    Raises:
        ValueError: something differs; the message names the file, column and row of the first difference.
    """
    check_shards(manifest, folder, contents=True)
    _check_disjoint(manifest, folder)
    work = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    by_split: dict[str, list[_Contents]] = {name: [] for name in manifest.splits}
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: _check_contents(manifest, folder, *item), work)
        for (name, _), contents in zip(
            work, tqdm(checked, total=len(work), desc="verifying", unit="file", disable=None), strict=True
        ):
            by_split[name].append(contents)
    _check_sums(manifest, folder, by_split)
    for column in manifest.categorical_columns:
        train_ids = sum(contents.ids[column.name] - contents.zeros[column.name] for contents in by_split["train"])
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


def _check_contents(manifest: Manifest, folder: Path, split: str, shard: Shard) -> _Contents:
    path = folder / shard.path
    id_counts, zeros, positives, weight = Counter[str](), Counter[str](), Counter[str](), 0.0
    if recorded_rows(path) != (split, shard.from_rows):
        raise _differs(folder, f"{shard.path} doesn't hold the rows that the manifest states, but those of another shard")
    for first_row, group in read_row_groups(path):
        where = f"{path}, rows {first_row} to {first_row + len(group)}"
        for label in manifest.labels:
            values = group.column(label.name).to_numpy()
            positives[label.name] += int(values.sum())
            if not np.isin(values, (0, 1)).all():
                raise UserError(f"{where}: {label.name} holds values other than 0 and 1; {REMEDY}")
        if manifest.weight:
            values = group.column(manifest.weight.name).to_numpy()
            weight += float(values.sum(dtype=np.float64))
            if not (np.isfinite(values) & (values >= 0)).all():
                raise UserError(
                    f"{where}: {manifest.weight.name} holds weights that are not finite numbers of at least 0; {REMEDY}"
                )
        for integer in manifest.integer_columns:
            values = group.column(integer.name).to_numpy()
            if not np.isfinite(values).all() or (integer.transform == "log" and (values < 0).any()):
                raise UserError(f"{where}: {integer.name} holds values that are not finite, or negative logarithms; {REMEDY}")
        for column in manifest.categorical_columns:
            cells = group.column(column.name).combine_chunks()
            ids = (cells.flatten() if column.is_list else cells).to_numpy()
            id_counts[column.name] += len(ids)
            zeros[column.name] += int(np.count_nonzero(ids == 0))
            if len(ids) and not 0 <= ids.min() <= ids.max() < column.num_embeddings:
                raise UserError(f"{where}: {column.name} holds ids that are not in 0..{column.num_embeddings - 1}; {REMEDY}")
    return _Contents(ids=id_counts, zeros=zeros, positives=positives, weight=weight)


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


def _check_sums(manifest: Manifest, folder: Path, by_split: Mapping[str, Sequence[_Contents]]) -> None:
    for column in manifest.categorical_columns:
        for name, stated in column.rows_at_zero.items():
            zeros = sum(contents.zeros[column.name] for contents in by_split[name])
            if zeros != stated:
                raise _differs(folder, f"{name} holds id 0 of {column.name} {zeros} times, not {stated}")
    for name, split in manifest.splits.items():
        for label in manifest.labels:
            positives, mean = sum(contents.positives[label.name] for contents in by_split[name]), label.split_means[name]
            if mean is not None and round(mean * split.rows) != positives:
                raise _differs(folder, f"{name} holds {positives} labels of 1, but the mean of {label.name} is stated as {mean}")
        total = sum(contents.weight for contents in by_split[name])
        mean = manifest.weight.split_means[name] if manifest.weight else None
        if mean is not None and not math.isclose(mean * split.rows, total, rel_tol=1e-9):
            raise _differs(folder, f"{name} holds weights that sum to {total}, but their mean is stated as {mean}")


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
    last = (np.iinfo(np.int64).max, -1)  # the count and value of the previous id
    least_of_bands: dict[int, int] = {}  # counts, if ids are in order of similarity within bands
    end_of_bands = min((*column.grown, column.num_embeddings)) - 1 if column.order == "similarity" else 0
    for rows, group in read_row_groups(path):
        if group.schema.names != ["value", "count"] or not pa.types.is_unsigned_integer(group.schema.types[0]):
            raise _differs(folder, f"{path.name} is not a vocabulary of values and counts")
        values, counts = (group.column(name).to_numpy() for name in ("value", "count"))
        if not len(values):
            break
        if table is None and column.table:
            table = _open_table(column, folder, values.dtype)
        in_bands = min(max(end_of_bands - rows, 0), len(values))
        restarts = np.isin(np.arange(rows, rows + len(values)), np.array(column.grown) - 1)
        restarts[:in_bands] = True
        falling = (counts[1:] < counts[:-1]) | ((counts[1:] == counts[:-1]) & (values[1:] > values[:-1]))
        falling |= restarts[1:]
        follows_last = restarts[0] or counts[0] < last[0] or (counts[0] == last[0] and values[0] > last[1])
        falls = falling.all() and follows_last and _falls_by_band(counts[:in_bands], rows, least_of_bands)
        if not falls or counts.min() < column.min_count:
            raise _differs(folder, f"{path.name}, from id {rows + 1} on, doesn't list values by falling counts")
        last = (int(counts[-1]), int(values[-1]))
        total += int(counts.sum())
        if table is not None:
            (ids,), _ = encode_keys([table], values[np.newaxis], np.zeros((1, len(values)), np.bool_))
            if (ids != np.arange(rows + 1, rows + 1 + len(values))).any():
                raise _differs(folder, f"the table of {column.name} gives its values different ids than {path.name}")
        rows += len(values)
    if rows + 1 != column.num_embeddings:
        raise _differs(folder, f"{column.name} has {column.num_embeddings} embeddings, but its vocabulary has {rows} values")
    if train_ids not in (None, total):
        raise _differs(folder, f"training rows hold {train_ids} ids of {column.name}, but its vocabulary counts {total}")


def _falls_by_band(counts: np.ndarray, first: int, least: dict[int, int]) -> bool:
    """Whether no count, from position `first` on, exceeds one of the band before; updates each band's least count."""
    bands = band_of(np.arange(first, first + len(counts)))
    for band in np.unique(bands).tolist():
        of_band = counts[bands == band]
        if of_band.max() > least.get(band - 1, of_band.max()):
            return False
        least[band] = min(int(of_band.min()), least.get(band, int(of_band.min())))
    return True


def _open_table(column: CategoricalColumn, folder: Path, dtype: np.dtype) -> TableIds:
    assert column.table
    path = check_file(column.table, folder, contents=True)
    slots, odd = divmod(path.stat().st_size, 2 * dtype.itemsize)
    ids = np.count_nonzero(map_array(path, dtype, (-1, 2))[:, 1]) if not odd else 0
    if odd or ids + 1 != column.num_embeddings or ids >= slots:
        raise _differs(folder, f"{path.name} is not a table of {column.num_embeddings - 1} values")
    return TableIds(path, dtype)


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"{folder}: {what}; {REMEDY}")
