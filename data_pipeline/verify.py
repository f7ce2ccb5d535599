"""Does a data set hold what its manifest says? Files, checksums, ids, labels, and that no row is in two splits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.columns import LABEL
from data_pipeline.manifest import REMEDY, Manifest, check_file, check_shards

_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was checked."""

    rows: int
    files: int
    bytes: int


def verify(manifest: Manifest, folder: Path) -> Verified:
    """Read a data set whole and compare it with its manifest.

    Checked: each file's size and SHA-256, each shard's rows; that the splits' shards take every row of the input once; every label,
    integer and id for its range; and the sums that the manifest states.

    Raises:
        ValueError: the first difference, with the file, column and row.
    """
    check_shards(manifest, folder, contents=True)
    _check_disjoint(manifest, folder)
    zeros: dict[str, Counter[str]] = {name: Counter() for name in manifest.splits}
    positives = Counter[str]()
    work = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: _check_contents(manifest, folder / item[1].path), work)
        for (name, _), (at_zero, ones) in zip(
            work, tqdm(checked, total=len(work), desc="verifying", unit="file", disable=None), strict=True
        ):
            zeros[name] += at_zero
            positives[name] += ones
    _check_sums(manifest, folder, zeros, positives)
    of_vocabularies = [file for column in manifest.categorical_columns for file in (column.vocabulary, column.table) if file]
    for file in of_vocabularies:
        check_file(file, folder, contents=True)
    for column in manifest.categorical_columns:
        if column.vocabulary and column.vocabulary.rows + 1 != column.num_embeddings:
            raise _differs(
                folder, f"{column.name} has {column.num_embeddings} embeddings, its vocabulary {column.vocabulary.rows} values"
            )
    shards = [shard for _, shard in work] + of_vocabularies
    return Verified(rows=manifest.rows.written, files=len(shards), bytes=sum(shard.bytes for shard in shards))


def _check_disjoint(manifest: Manifest, folder: Path) -> None:
    """The ranges that shards take their rows from tile the input, and the shards of each range take all its rows between them."""
    taken: dict[tuple[int, int], int] = defaultdict(int)
    last_of_split: dict[str, int] = {}
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.from_rows is None:
                raise _differs(folder, f"{shard.path} doesn't say which rows it holds")
            if shard.from_rows[0] < last_of_split.get(name, 0):
                raise _differs(folder, f"{shard.path} takes rows again that an earlier shard of {name} took")
            last_of_split[name] = shard.from_rows[1]
            taken[shard.from_rows] += shard.rows
    position = 0
    for (start, stop), rows in sorted(taken.items()):
        if start != position or rows != stop - start:
            raise _differs(folder, f"rows {start} to {stop} of the input give {rows} rows of the splits, after row {position}")
        position = stop
    if position != manifest.rows.written:
        raise _differs(folder, f"the splits hold {position} of {manifest.rows.written} rows")


def _check_contents(manifest: Manifest, path: Path) -> tuple[Counter[str], int]:
    """How many ids of each column are 0, and the sum of labels."""
    zeros, ones = Counter[str](), 0
    for first_row, group in read_row_groups(path):
        where = f"{path}, rows {first_row} to {first_row + len(group)}"
        if manifest.label:
            label = group.column(LABEL).to_numpy()
            ones += int(label.sum())
            if not np.isin(label, (0, 1)).all():
                raise ValueError(f"{where}: {LABEL} holds other values than 0 and 1; {REMEDY}")
        for integer in manifest.integer_columns:
            values = group.column(integer.name).to_numpy()
            if not np.isfinite(values).all() or (integer.transform == "log" and (values < 0).any()):
                raise ValueError(f"{where}: {integer.name} holds values that are no logarithms of at least 1; {REMEDY}")
        for column in manifest.categorical_columns:
            ids = ids_of(group, column.name, is_list=column.is_list)
            zeros[column.name] += int(np.count_nonzero(ids == 0))
            if len(ids) and not 0 <= ids.min() <= ids.max() < column.num_embeddings:
                raise ValueError(f"{where}: {column.name} holds ids that are not in 0..{column.num_embeddings - 1}; {REMEDY}")
    return zeros, ones


def read_row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """Row groups of a Parquet file, of some columns or all, each with the number of its first row.

    Raises:
        ValueError: the file or a group can't be read.
    """
    row = 0
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, columns=columns, use_threads=False)
                yield row, group
                row += len(group)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}, from row {row} on, cannot be read ({error}); {REMEDY}") from error


def ids_of(group: pa.Table, name: str, *, is_list: bool) -> np.ndarray:
    """The ids of a column, those of lists end to end."""
    column = group.column(name).combine_chunks()
    ids: np.ndarray = (column.flatten() if is_list else column).to_numpy()
    return ids


def _check_sums(manifest: Manifest, folder: Path, zeros: dict[str, Counter[str]], positives: Counter[str]) -> None:
    for column in manifest.categorical_columns:
        for name, stated in column.rows_at_zero.items():
            if zeros[name][column.name] != stated:
                raise _differs(folder, f"{name} holds id 0 of {column.name} {zeros[name][column.name]} times, not {stated}")
    for name, split in manifest.splits.items():
        stated_mean = manifest.label.split_means[name] if manifest.label else None
        if stated_mean is not None and round(stated_mean * split.rows) != positives[name]:
            raise _differs(folder, f"{name} holds {positives[name]} labels of 1, where the mean is stated as {stated_mean}")


def _differs(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: {what}; {REMEDY}")
