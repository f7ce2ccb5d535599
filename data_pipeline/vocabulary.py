"""Between the passes: builds vocabularies ordered by training frequency from sorted runs, column by column in bounded memory.

Id 0 = missing, rare or unseen; 1, 2, ... from the most frequent value on, equal counts by value. Neighboring ids then have similar
frequencies, so frequent rows share leading digits in a TT table.

1. The runs of all parts are merged (`data_pipeline.runs`), in levels if there are many.
2. Values that are frequent enough are written to disk with their counts. A histogram of the counts then gives the first id of each
   count, and another pass over the values assigns ids by counting sort, so that equal counts stay in the order of the values.

Vocabularies can be extended by new values. Known values keep their ids and counts, so a model's embedding rows keep their
meaning; new values are appended by falling count in the new training rows, equal counts by value.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.arrow import to_arrow
from data_pipeline.atomic import remove, replacing
from data_pipeline.count_pass import GroupCounts
from data_pipeline.errors import UserError
from data_pipeline.hashing import IdSource, allocate, encode_keys, release, write_table
from data_pipeline.job import Job
from data_pipeline.manifest import CategoricalColumn, Shard, check_file, describe_file, read_row_groups
from data_pipeline.options import PreprocessOptions
from data_pipeline.runs import Counted, Run, merge, merge_in_levels
from data_pipeline.schema import file_name

_BLOCK = 1 << 20
_MOST_IDS = 2**31 - 1


def fit_counted(
    job: Job, groups: Sequence[GroupCounts], fit: Callable[[int, Iterable[Counted]], CategoricalColumn]
) -> dict[int, CategoricalColumn]:
    """Merge the values of the counted columns, and fit each column to its values.

    An interrupted call resumes, because each finished column is recorded. The runs of values are removed once all are.

    Args:
        fit: takes a column's number and its values, ascending, with their training counts, block by block.
    """
    numbers, folder, columns = sorted(job.counted), job.work.path / "counts", len(job.schema.categories)
    merging: dict[str, Any] = {"key_dtype": job.schema.key_dtype, "entries": job.options.merged_entries}
    runs: Sequence[Run] = [replace(run, trains=group.trains) for group in groups for run in group.runs]
    names = {number: f"tables/{number:03d}" for number in numbers}
    if not all(job.work.load(name, CategoricalColumn) for name in names.values()):
        runs = merge_in_levels(runs, folder, columns=columns, workers=job.options.threads, **merging)

    def fit_column(number: int) -> CategoricalColumn:
        merged = merge(runs, folder, number, **merging)
        return job.work.once(names[number], CategoricalColumn, lambda: fit(number, merged))

    with ThreadPoolExecutor(job.options.threads) as pool:
        fitted = pool.map(fit_column, numbers)
        by_number = dict(zip(numbers, tqdm(fitted, total=len(numbers), desc="merging", unit="column", disable=None), strict=True))
    for pattern in ("*.keys", "*.counts"):
        for file in folder.glob(pattern):
            file.unlink()
    return by_number


def fit_categories(job: Job, options: PreprocessOptions, groups: Sequence[GroupCounts]) -> tuple[CategoricalColumn, ...]:
    """Write the vocabularies, and describe all categorical columns except for what is known only after encoding."""
    fitted = fit_counted(job, groups, partial(_fit, job, options, groups))
    columns = range(len(job.schema.categories))
    return tuple(fitted.get(number) or _fit(job, options, groups, number, ()) for number in columns)


def _fit(
    job: Job, options: PreprocessOptions, groups: Sequence[GroupCounts], number: int, values: Iterable[Counted]
) -> CategoricalColumn:
    """Describe a column by its values, which are empty if they were not counted."""
    column = job.schema.column_of(job.schema.categories[number])
    buckets = options.buckets_of(column)
    missing = sum(group.missing[number] for group in groups)
    described = partial(CategoricalColumn, name=column.name, missing=missing, rows_at_zero={}, is_list=column.kind == "list")
    if buckets is not None:
        return described(num_embeddings=buckets, distinct=None, min_count=0, vocabulary=None)
    min_count, dtype, work = options.min_counts.get(column.name, options.min_count), job.schema.key_dtype, job.work.path / "tables"
    with ranked(column.name, values, key_dtype=dtype, min_count=min_count, work=work) as (frequent, distinct):
        data = job.work.ranked if options.order == "similarity" else job.work.data
        file, table = write_vocabulary(column.name, frequent.counted, len(frequent), key_dtype=dtype, data=data)
        ids = len(frequent) + 1
    return described(num_embeddings=ids, distinct=distinct, min_count=min_count, vocabulary=file, table=table)


def extend_vocabulary(job: Job, column: CategoricalColumn, known: Path, values: Iterable[Counted]) -> CategoricalColumn:
    """Write a column's vocabulary and table with the values of new logs that are frequent enough.

    Args:
        column: from the known data set; it has a vocabulary.
        known: the known data set's folder.
        values: of the new logs, as for `data_pipeline.vocabulary.ranked`.

    Returns:
        The column with its new files, or unchanged if there are no new values.

    Raises:
        ValueError: there are more ids than an int32 can hold.
    """
    assert column.vocabulary, "only columns with a vocabulary are extended"
    assert column.table, "which is written with the vocabulary"
    known_rows, vocabulary = column.vocabulary.rows, check_file(column.vocabulary, known)
    dtype = job.schema.key_dtype
    id_source = IdSource(check_file(column.table, known), dtype, job.options.table_bytes // job.options.threads)
    new_values, work = _without_id(values, id_source), job.work.path / "tables"
    with ranked(column.name, new_values, key_dtype=dtype, min_count=column.min_count, work=work) as (new, _):
        if not len(new):
            return column
        rows = known_rows + len(new)
        if rows >= _MOST_IDS:
            raise UserError(f"{column.name} would have {rows} values, more than 32-bit ids allow; preprocess all logs again")

        def blocks() -> Iterator[Counted]:
            for _, group in read_row_groups(vocabulary):
                yield group.column("value").to_numpy(), group.column("count").to_numpy()
            yield from new.counted()

        file, table = write_vocabulary(column.name, blocks, rows, key_dtype=dtype, data=job.work.data)
    return replace(column, num_embeddings=rows + 1, vocabulary=file, table=table, grown=(*column.grown, column.num_embeddings))


def _without_id(values: Iterable[Counted], id_source: IdSource) -> Iterator[Counted]:
    for keys, counts in values:
        ids, _ = encode_keys([id_source], keys[np.newaxis], np.zeros((1, len(keys)), np.bool_))
        yield keys[ids[0] == 0], counts[ids[0] == 0]


@contextmanager
def ranked(
    name: str, values: Iterable[Counted], *, key_dtype: np.dtype, min_count: int, work: Path
) -> Iterator[tuple["_Values", int]]:
    """Yield a column's frequent values in the order of their ids, which stay on disk until the block ends, and the number of all.

    Args:
        values: distinct keys, ascending, with their counts, block by block.
        min_count: values seen fewer times in training are left out.
        work: a folder for temporary files.

    Raises:
        ValueError: there are more ids than an int32 can hold.
    """
    dtype = np.dtype([("key", key_dtype), ("count", np.int64)])
    frequent, by_id = (_Values(work / f"{file_name(name)}.{suffix}", dtype) for suffix in ("values", "by-id"))
    distinct = 0
    with frequent.path.open("wb") as file:
        for keys, counts in values:
            distinct += len(keys)
            is_frequent = counts >= min_count
            block = np.empty(np.count_nonzero(is_frequent), dtype)
            block["key"], block["count"] = keys[is_frequent], counts[is_frequent]
            file.write(block.view(np.uint8).data)  # ndarray.tofile ignores a full disk
    if len(frequent) >= _MOST_IDS:
        raise UserError(
            f"{name} has {len(frequent)} values with at least {min_count} rows; raise `min_count` {name}={min_count + 1}"
        )
    ordered = allocate(by_id.path, dtype, len(frequent))
    for ids, block in zip(_ids_by_count(frequent), frequent.blocks(), strict=True):
        ordered[ids - 1] = block
        release(ordered)
    yield by_id, distinct
    remove(frequent.path)
    remove(by_id.path)


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
class _Values:
    """Keys with their counts in a file, read block by block."""

    path: Path
    dtype: np.dtype

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield at least one block, which may be empty."""
        for start in range(0, max(len(self), 1), _BLOCK):
            yield np.fromfile(self.path, self.dtype, _BLOCK, offset=start * self.dtype.itemsize)

    def counted(self) -> Iterator[Counted]:
        """Yield keys and counts as separate arrays, block by block."""
        for block in self.blocks():
            yield np.ascontiguousarray(block["key"]), np.ascontiguousarray(block["count"])


def _ids_by_count(values: _Values) -> Iterator[np.ndarray]:
    """Yield the ids of each block of counts: from 1 for the highest count, equal counts in the order of their values."""
    classes = np.empty(0, np.int64)  # n rows have at most sqrt(2 n) distinct counts
    for block in values.blocks():
        classes = np.union1d(classes, block["count"])
    sizes = np.zeros(len(classes), np.int64)
    for block in values.blocks():
        sizes += np.bincount(np.searchsorted(classes, block["count"]), minlength=len(classes))
    next_id = 1 + np.cumsum(sizes[::-1])[::-1] - sizes  # higher counts get lower ids
    for block in values.blocks():
        class_of = np.searchsorted(classes, block["count"])
        order = np.argsort(class_of, kind="stable")
        ordered = class_of[order]
        ids = np.empty(len(class_of), np.int64)
        ids[order] = next_id[ordered] + np.arange(len(class_of)) - np.searchsorted(ordered, ordered)
        next_id += np.bincount(class_of, minlength=len(classes))
        yield ids
