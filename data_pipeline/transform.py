"""Encoding of new logs with a data set's vocabularies: pass 2 of `data_pipeline.preprocess`, after a pass 1 without value counts.

Optionally, values of the new training rows that have no id in DATA get new ids after the known ones (`data_pipeline.extend`).

NEWDATA has its own vocabularies (links to DATA's files if the file system allows links), so DATA may be deleted. Ids mean the same
in both, so a model trained on one can read the other. Values without an id become 0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data_pipeline.atomic import refuse_overlap, replacing
from data_pipeline.cluster import dask_schedule
from data_pipeline.count_pass import (
    Group,
    count_logs,
    describe_inputs,
    merged_values,
    remove_runs,
    train_and_rest,
)
from data_pipeline.encoder import check_columns, new_logs_schema, open_encoder, recorded_log
from data_pipeline.extend import extend_vocabulary
from data_pipeline.job import Job
from data_pipeline.manifest import (
    FILES,
    MANIFEST_NAME,
    SPLITS,
    CategoricalColumn,
    Manifest,
    RowCounts,
    Shard,
    Transformed,
    check_file,
    file_sha256,
    read_manifest,
    versions,
    write_manifest,
)
from data_pipeline.names import check_names
from data_pipeline.options import PassOptions
from data_pipeline.parts import identify, inputs_changed
from data_pipeline.pool import Schedule, on_threads
from data_pipeline.schema import LogSchema
from data_pipeline.splits import Splitting
from data_pipeline.work import Tell, work_folder
from data_pipeline.write_pass import count_zeros, describe_splits, describe_targets, write_logs

_SPLIT_OPTIONS = ("split", "val_fraction", "test_fraction", "seed", "val_from", "test_from")


@dataclass(frozen=True, kw_only=True)
class TransformOptions(PassOptions):
    """Options of `transform`.

    Args:
        data: the data set whose vocabularies and offsets are used.
        schema: the new logs' columns; None for those of `data`'s logs, in Criteo's format with a label if the first log has one.
        split: the split that takes all new rows, or "source" to split them as `data`'s logs were.
        extend: give new ids, after the known ones, to values of the new training rows that have no id in `data`.
    """

    data: Path
    schema: LogSchema | None = None
    split: Literal["source", "train", "val", "test"] = "source"
    extend: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "data", [self.data], within=True)
        if self.split not in ("source", *SPLITS):
            raise ValueError(f"--split is {self.split!r}; choose one of source, {', '.join(SPLITS)}")


def transform(options: TransformOptions, tell: Tell = lambda line: None) -> Manifest:
    """Write the new data set and return its manifest. After an interruption, calling it again resumes.

    Args:
        options: of the run.
        tell: takes messages for the user, such as that an earlier run is resumed.

    Raises:
        ValueError: an input is missing, damaged or malformed, or has other columns than the data set; or the output exists.
        OSError: the output cannot be written.
    """
    source = read_manifest(options.data)
    known = recorded_log(source, options.data)
    logs = identify(options.inputs)
    schema = options.schema or new_logs_schema(known, options.inputs[0])
    check_columns(schema, known, log=options.inputs[0], data=options.data)
    names = tuple(check_names(log, schema) for log in options.inputs)
    split: dict[str, Any] = {"split": options.split}
    if options.split == "source":
        split = {name: source.options[name] for name in _SPLIT_OPTIONS if name in source.options}
    Splitting.recorded(split).check_column(schema)
    origin = Transformed(data=str(options.data), manifest_sha256=file_sha256(options.data / MANIFEST_NAME))
    identity = {
        "inputs": [asdict(log) for log in logs],
        "columns": asdict(schema),
        "vocabularies": origin.manifest_sha256,
        "versions": versions(),
        "part_bytes": options.part_bytes,
        "extend": options.extend,
    } | split
    scheduled = dask_schedule(options.scheduler, workers=options.threads) if options.scheduler else nullcontext(on_threads)
    with (
        scheduled as schedule,
        work_folder(options.output, identity=identity, files=FILES, overwrite=options.overwrite, tell=tell) as work,
    ):
        job = Job(
            options=options,
            schema=schema,
            logs=logs,
            work=work,
            splitting=Splitting.recorded(split),
            names=names,
            counted=frozenset(_with_vocabulary(source) if options.extend else ()),
        )
        manifest = replace(_run(job, source, options.data, schedule), transformed=origin)
        manifest = replace(manifest, options={**split, "part_bytes": options.part_bytes, "max_bad_rows": options.max_bad_rows})
        work.remove_unfinished()
        if identify(options.inputs) != logs:
            raise inputs_changed()
        write_manifest(manifest, work.data)
    return manifest


def _run(job: Job, source: Manifest, data: Path, schedule: Schedule) -> Manifest:
    for folder in (*SPLITS, "vocabulary"):
        (job.work.data / folder).mkdir(exist_ok=True)
    parts = count_logs(job, schedule)
    rows_of_logs = [sum(part.counts.rows for part in parts if part.log == log) for log in range(len(job.logs))]
    rows = sum(rows_of_logs)
    if not rows:
        raise ValueError("--input holds no well-formed lines; give logs that have some")
    bounds = job.splitting.bounds(rows_of_logs)
    if job.counted:
        source = replace(source, categorical_columns=_extended(job, source, data, train_and_rest(job, parts, bounds[0])))
    for column in source.categorical_columns:
        for file in (column.vocabulary, column.table):
            if file and not (job.work.data / file.path).exists():
                _link(file, data, job.work.data)
    encoder = open_encoder(source.integer_columns, source.categorical_columns, job.work.data, job.schema, **job.options.table_room)
    written = write_logs(job, schedule, parts, bounds, encoder)
    inputs, rejected_lines = describe_inputs(job, parts)
    rejected = sum(log.rows_rejected for log in inputs)
    groups = [group for part in parts for group in (part.counts.train, part.counts.rest)]
    return replace(
        source,
        versions=versions(),
        inputs=inputs,
        rows=RowCounts(read=rows + rejected, written=rows, rejected=rejected),
        rejected_lines=rejected_lines,
        **describe_targets(written, job.schema),
        integer_columns=tuple(
            replace(column, missing=sum(group.integers[number].missing for group in groups))
            for number, column in enumerate(source.integer_columns)
        ),
        categorical_columns=tuple(
            replace(column, distinct=None, missing=sum(group.missing[number] for group in groups))
            for number, column in enumerate(count_zeros(source.categorical_columns, written))
        ),
        splits=describe_splits(written),
        log=job.schema,
    )


def _extended(job: Job, source: Manifest, data: Path, groups: Sequence[Group]) -> tuple[CategoricalColumn, ...]:
    """Return the data set's categorical columns, with extended vocabularies."""
    records = {number: f"tables/{number:03d}" for number in _with_vocabulary(source)}
    recorded = {number: job.work.load(record, CategoricalColumn) for number, record in records.items()}
    extended = {number: column for number, column in recorded.items() if column}
    if len(extended) < len(records):
        values_of = merged_values(job, groups)

    def extend(number: int) -> CategoricalColumn:
        if number not in extended:
            column = source.categorical_columns[number]
            extended[number] = extend_vocabulary(
                column,
                values_of(number),
                key_dtype=job.schema.key_dtype,
                max_ids=job.schema.column_of(column.name).max_ids,
                room=job.options.table_bytes // job.options.threads,
                known=data,
                data=job.work.data,
                work=job.work.path / "tables",
            )
            job.work.save(records[number], extended[number])
        return extended[number]

    with ThreadPoolExecutor(job.options.threads) as pool:
        columns = dict(zip(records, pool.map(extend, records), strict=True))
    remove_runs(job)
    return tuple(columns.get(number, column) for number, column in enumerate(source.categorical_columns))


def _with_vocabulary(source: Manifest) -> list[int]:
    """Return the numbers of the categorical columns that have a vocabulary."""
    return [number for number, column in enumerate(source.categorical_columns) if column.vocabulary]


def _link(file: Shard, data: Path, new: Path) -> None:
    """Link a vocabulary's file into the new data set, or copy it. Links are safe because files of a data set are never modified."""
    origin, path = check_file(file, data), new / file.path
    if path.exists():
        return
    with replacing(path) as temporary:
        try:
            os.link(origin, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(origin, temporary)
