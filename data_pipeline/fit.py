"""Between the passes: vocabularies and boundaries of the categorical columns, as the manifest records them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tqdm import tqdm

from data_pipeline.buckets import Counted, quantiles
from data_pipeline.count_pass import Group, merged_values, remove_runs
from data_pipeline.job import Job
from data_pipeline.manifest import CategoricalColumn
from data_pipeline.options import PreprocessOptions
from data_pipeline.schema import Column
from data_pipeline.vocabulary import build_vocabulary


def is_counted(options: PreprocessOptions, column: Column) -> bool:
    """Whether a categorical column's ids depend on how often its values occur."""
    return column.buckets is not None if column.bucketized else options.buckets_of(column) is None


def fit_categories(job: Job, options: PreprocessOptions, groups: Sequence[Group]) -> tuple[CategoricalColumn, ...]:
    """Write the vocabularies, and describe all categorical columns except for what is known only after encoding.

    An interrupted call resumes, because each finished column is recorded.
    """
    records = {number: f"tables/{number:03d}" for number in sorted(job.counted)}
    recorded = {number: job.work.load(record, CategoricalColumn) for number, record in records.items()}
    fitted = {number: column for number, column in recorded.items() if column}
    if len(fitted) < len(records):
        values_of = merged_values(job, groups)

    def fit(number: int) -> CategoricalColumn:
        if number not in fitted:
            fitted[number] = _fit(job, options, groups, number, values_of(number))
            job.work.save(records[number], fitted[number])
        return fitted[number]

    with ThreadPoolExecutor(options.threads) as pool:
        list(tqdm(pool.map(fit, records), total=len(records), desc="merging", unit="column", disable=None))
    remove_runs(job)
    columns = range(len(job.schema.categories))
    return tuple(fitted[number] if number in fitted else _fit(job, options, groups, number, ()) for number in columns)


def _fit(
    job: Job, options: PreprocessOptions, groups: Sequence[Group], number: int, values: Iterable[Counted]
) -> CategoricalColumn:
    """Describe a column by its values: ascending, block by block; empty if they were not counted."""
    column = job.schema.column_of(job.schema.categories[number])
    missing = sum(group.counts.missing[number] for group in groups)
    described = CategoricalColumn(
        name=column.name,
        num_embeddings=options.buckets_of(column) or 0,
        distinct=None,
        missing=missing,
        min_count=0,
        rows_at_zero={},
        vocabulary=None,
        is_list=column.kind == "list",
    )
    if column.bucketized:
        boundaries = column.boundaries
        if column.buckets is not None:
            total = sum(group.counts.rows - group.counts.missing[number] for group in groups if group.trains)
            boundaries = quantiles(values, total, column.buckets)
        return replace(described, num_embeddings=len(boundaries) + 2, boundaries=boundaries)
    if not is_counted(options, column):
        return described
    vocabulary = build_vocabulary(
        column.name,
        values,
        key_dtype=job.schema.key_dtype,
        min_count=options.min_count_of(column.name),
        max_ids=column.max_ids,
        data=job.work.data,
        work=job.work.path / "tables",
    )
    return replace(
        described,
        num_embeddings=vocabulary.num_embeddings,
        distinct=vocabulary.distinct,
        min_count=options.min_count_of(column.name),
        vocabulary=vocabulary.file,
        table=vocabulary.table,
    )
