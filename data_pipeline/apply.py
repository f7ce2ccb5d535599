"""A function of encoded rows, applied to a whole log or split of a data set; its columns are written to one Parquet file.

    options = ApplyOptions(inputs=(Path("today.gz"),), data=Path("data/"), output=Path("scores.parquet"))
    apply(function, options, identity={"model": ...}, preload=__name__)

The work is done in parts, to bound memory and let a killed run resume; a split's shards are read like Parquet logs. The columns of
the file: `line` of the log from 1, or `row` of the split from 0; those of the function; labels, if there are any.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import refuse_overlap, replacing
from data_pipeline.encoder import Flat, flatten, open_encoder, schema_of_new_logs
from data_pipeline.errors import UserError
from data_pipeline.job import Job, open_job
from data_pipeline.manifest import Manifest, check_shards, read_manifest
from data_pipeline.options import PassOptions
from data_pipeline.parts import Part, count_parts
from data_pipeline.passes import PartRecord, part_name, pass_over
from data_pipeline.schema import Column, LogSchema
from data_pipeline.shards import Encoder
from data_pipeline.splits import Splitting, in_pieces
from data_pipeline.work import Tell

BATCH_ROWS = 512  # few enough to fit the caches, enough to amortize a call
Function = Callable[[Iterable[Flat]], Mapping[str, np.ndarray]]
"""Takes batches of consecutive rows, and returns columns with one element for each."""


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(PassOptions):
    """Options of `apply`.

    Args:
        inputs: a log, or the folder of a data set.
        data: folder of the data set whose vocabularies encode a log.
        split: the split of a data set.
    """

    data: Path | None = None
    split: str = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "input", self.inputs, within=True)
        refuse_overlap(self.output, "data", [self.data] if self.data else [], within=True)

    @property
    def folder(self) -> Path | None:
        """Folder of the input if it is a data set."""
        first = self.inputs[0]
        return first if isinstance(first, Path) and first.is_dir() else None


def apply(
    function: Function, options: ApplyOptions, *, identity: dict[str, Any], preload: str, tell: Tell = lambda line: None
) -> int:
    """Write the function's columns for a log or a split, and return the rows; after an interruption, the same call resumes.

    Args:
        identity: what determines the function's results, as JSON values.
        preload: name of a module that worker processes inherit, because importing it takes seconds.

    Raises:
        ValueError: the input is invalid, or doesn't fit the data set.
        OSError: the output can't be written.
    """
    folder = options.folder
    if folder:
        manifest = read_manifest(folder)
        options, schema = _as_logs(options, manifest, folder)
        work, settings = partial(_apply_to_rows, function, manifest), {"split": options.split}
    else:
        assert options.data, "the caller names the vocabularies of a log"
        manifest = read_manifest(options.data)
        schema = Splitting().schema_used(schema_of_new_logs(manifest, options.data, options.inputs[0]))
        encoder = open_encoder(manifest.integer_columns, manifest.categorical_columns, options.data, schema)
        work, settings = partial(_apply_to_lines, function, encoder), {"data": str(options.data)}
    workers = min(options.threads, sum(count_parts(log, options.part_bytes) or 1 for log in options.inputs))
    identity = identity | settings | {"part_bytes": options.part_bytes}
    with (
        _executor(workers, preload) as executor,
        open_job(options, schema, Splitting(), files=None, identity=identity, tell=tell, executor=executor) as job,
    ):
        records = pass_over(job, work, PartRecord, folder="shards", description="scoring")
        _join(job, records, first=0 if folder else job.first_line(0))
    return sum(part.rows for part in records)


def _as_logs(options: ApplyOptions, manifest: Manifest, folder: Path) -> tuple[ApplyOptions, LogSchema]:
    """Return options that name the shards of the split as logs, and a schema that reads all columns."""
    if options.split not in manifest.splits:
        raise UserError(f"`split` is {options.split!r}; choose one of {', '.join(manifest.splits)}")
    shards = tuple(folder / shard.path for shard in manifest.splits[options.split].shards)
    if not shards:
        raise UserError(f"split {options.split} of {folder} is empty; choose another `split`")
    check_shards(manifest, folder)
    columns: tuple[Any, ...] = (*manifest.labels, *manifest.integer_columns, *manifest.categorical_columns)
    schema = LogSchema(columns=tuple(Column(name=column.name, kind="category") for column in columns))
    return replace(options, inputs=shards), schema


def _apply_to_lines(function: Function, encoder: Encoder, job: Job, part: Part, _: None) -> PartRecord:
    parsed = job.parse(part)
    columns = function(flatten(encoder, parsed, rows) for rows in in_pieces(slice(0, parsed.rows), BATCH_ROWS))
    line = parsed.starts - part.start
    if isinstance(part.content, bytes):
        newlines = np.flatnonzero(np.frombuffer(part.content, np.uint8) == ord("\n"))
        line = np.searchsorted(newlines, line) - (1 if job.schema.header and not part.start else 0)
    _save(job, part, {"line": line, **columns, **dict(zip(job.schema.labels, parsed.labels, strict=True))})
    return PartRecord.of(part, parsed)


def _apply_to_rows(function: Function, manifest: Manifest, job: Job, part: Part, _: None) -> PartRecord:
    table, rows = part.content, len(part.content)
    assert isinstance(table, pa.Table), "shards are Parquet"
    batches = (flat_rows(table.slice(start, BATCH_ROWS), manifest) for start in range(0, rows, BATCH_ROWS))
    columns = function(batches)
    by_label = {label.name: table.column(label.name).to_numpy() for label in manifest.labels}
    _save(job, part, {"row": np.arange(rows), **columns, **by_label})
    return PartRecord(log=part.log, number=part.number, last=part.last, lines=rows, rows=rows)


@contextmanager
def _executor(workers: int, preload: str) -> Iterator[Executor]:
    """Start workers: processes, because compiled models hold Python's lock, or a thread where one worker is enough."""
    if workers <= 1:
        executor: Executor = ThreadPoolExecutor(1)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        executor = ProcessPoolExecutor(workers, context)
    with executor:
        yield executor


def flat_rows(rows: pa.Table, manifest: Manifest) -> Flat:
    """Convert rows of a shard to a model's inputs."""
    dense = np.empty((len(rows), len(manifest.integer_columns)), np.float32)
    for number, integer_column in enumerate(manifest.integer_columns):
        dense[:, number] = rows.column(integer_column.name).to_numpy()
    values, lengths = [np.empty(0, np.int64)], np.ones((len(manifest.categorical_columns), len(rows)), np.int32)
    for column_lengths, column in zip(lengths, manifest.categorical_columns, strict=True):
        ids = rows.column(column.name).combine_chunks()
        if column.is_list:
            column_lengths[:] = np.diff(ids.offsets.to_numpy())
            ids = ids.flatten()
        values.append(ids.to_numpy())
    return Flat(dense, np.concatenate(values, dtype=np.int64), lengths.ravel())


def _save(job: Job, part: Part, columns: Mapping[str, np.ndarray]) -> None:
    with replacing(job.work.data / f"{part_name(part)}.parquet") as beside:
        pq.write_table(pa.table(dict(columns)), beside)


def _join(job: Job, records: Sequence[PartRecord], *, first: int) -> None:
    """Join all parts in one file, and number their lines or rows from `first` on."""
    before, writer = first, None
    with replacing(job.work.data / job.options.output.name) as beside:
        for record in records:
            table = pq.read_table(job.work.data / f"{part_name(record)}.parquet")
            table = table.set_column(0, table.column_names[0], pa.array(table.column(0).to_numpy() + before))
            before += record.lines
            writer = writer or pq.ParquetWriter(beside, table.schema)
            writer.write_table(table)
        assert writer is not None, "a log has a part, and a split shards"
        writer.close()
