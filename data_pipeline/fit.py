"""Between the passes: vocabularies of the categorical columns, as the manifest records them.

Vocabularies can be extended by new values. Known values keep their ids and counts, so a model's embedding rows keep their
meaning; new values are appended by falling count in the new training rows, equal counts by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_pipeline.counts import GroupCounts
from data_pipeline.errors import UserError
from data_pipeline.hashing import IdSource, encode_keys
from data_pipeline.job import Job
from data_pipeline.manifest import CategoricalColumn, check_file
from data_pipeline.options import PreprocessOptions
from data_pipeline.runs import Counted, merge, merge_in_levels
from data_pipeline.verify import read_row_groups
from data_pipeline.vocabulary import MOST_IDS, ranked, write_vocabulary


def fit_counted(
    job: Job, groups: Sequence[GroupCounts], fit: Callable[[int, Iterable[Counted]], CategoricalColumn]
) -> dict[int, CategoricalColumn]:
    """Merge the values of the counted columns, and fit each column to its values.

    An interrupted call resumes, because each finished column is recorded. The runs of values are removed at the end.

    Args:
        fit: takes a column's number and its values, ascending, with their training counts, block by block.
    """
    numbers, folder, columns = sorted(job.counted), job.work.path / "counts", len(job.schema.categories)
    merging: dict[str, Any] = {"key_dtype": job.schema.key_dtype, "entries": job.options.merged_entries}
    parts = [replace(run, trains=group.trains) for group in groups for run in group.runs]
    runs = merge_in_levels(parts, job.work, folder, columns=columns, workers=job.options.threads, **merging)

    def fit_column(number: int) -> CategoricalColumn:
        merged = merge(runs, folder, number, **merging)
        return job.work.once(f"tables/{number:03d}", CategoricalColumn, lambda: fit(number, merged))

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
    described = CategoricalColumn(
        name=column.name,
        num_embeddings=buckets or 0,
        distinct=None,
        missing=sum(group.missing[number] for group in groups),
        min_count=0,
        rows_at_zero={},
        vocabulary=None,
        is_list=column.kind == "list",
    )
    if buckets is not None:
        return described
    min_count, dtype, work = options.min_counts.get(column.name, options.min_count), job.schema.key_dtype, job.work.path / "tables"
    with ranked(column.name, values, key_dtype=dtype, min_count=min_count, most=column.max_ids, work=work) as frequent:
        data = job.work.ranked if options.order == "similarity" else job.work.data
        file, table = write_vocabulary(column.name, frequent.blocks, frequent.rows, key_dtype=dtype, data=data)
        vocabulary: dict[str, Any] = {"distinct": frequent.distinct, "num_embeddings": frequent.rows + 1}
    return replace(described, **vocabulary, min_count=min_count, vocabulary=file, table=table)


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
    dtype, max_ids = job.schema.key_dtype, job.schema.column_of(column.name).max_ids
    id_source = IdSource(check_file(column.table, known), dtype, job.options.table_bytes // job.options.threads)
    most = None if max_ids is None else max(0, max_ids - known_rows)
    new_values, work = _without_id(values, id_source), job.work.path / "tables"
    with ranked(column.name, new_values, key_dtype=dtype, min_count=column.min_count, most=most, work=work) as new:
        if not new.rows:
            return column
        rows = known_rows + new.rows
        if rows >= MOST_IDS:
            raise UserError(f"{column.name} would have {rows} values, more than 32-bit ids allow; preprocess all logs again")

        def blocks() -> Iterator[Counted]:
            for _, group in read_row_groups(vocabulary):
                yield group.column("value").to_numpy(), group.column("count").to_numpy()
            yield from new.blocks()

        file, table = write_vocabulary(column.name, blocks, rows, key_dtype=dtype, data=job.work.data)
    return replace(column, num_embeddings=rows + 1, vocabulary=file, table=table, grown=(*column.grown, column.num_embeddings))


def _without_id(values: Iterable[Counted], id_source: IdSource) -> Iterator[Counted]:
    for keys, counts in values:
        ids, _ = encode_keys([id_source], keys[np.newaxis], np.zeros((1, len(keys)), np.bool_))
        yield keys[ids[0] == 0], counts[ids[0] == 0]
