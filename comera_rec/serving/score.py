"""Scores of a log, or of a split of a data set, in one Parquet file.

Columns of the file: `line` of the log from 1, or `row` of the split from 0; `score`, the probability of label 1, float32, or
`score_LABEL` for each of several labels; the labels themselves if there are any.

The work is done in parts, to bound memory and let a killed run resume; a split's shards are read like Parquet logs.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from comera_rec.serving.package import ServingModel, read_metadata
from comera_rec.serving.vocabularies import check_vocabularies, open_vocabularies, run_of
from data_pipeline.atomic import refuse_overlap, replacing
from data_pipeline.encoder import Flat, flatten, open_encoder, schema_of_new_logs
from data_pipeline.errors import UserError
from data_pipeline.job import Job, open_job
from data_pipeline.manifest import Manifest, check_shards, file_sha256, read_manifest
from data_pipeline.options import PassOptions
from data_pipeline.parts import Part, count_parts
from data_pipeline.passes import PartRecord, part_name, pass_over
from data_pipeline.schema import Column, LogSchema
from data_pipeline.shards import Encoder
from data_pipeline.splits import Splitting, in_pieces

_BATCH_ROWS = 512  # few enough to fit the caches, enough to amortize a call


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PassOptions):
    """Options of scoring.

    Args:
        inputs: a log, or the folder of a data set.
        model: MODEL.pt2.
        data: folder of the data set whose vocabularies encode a log; None takes the one that the model was trained on.
        split: the split of a data set.
    """

    model: Path
    data: Path | None = None
    split: str = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "input", self.inputs, within=True)
        refuse_overlap(self.output, "data", [self.data] if self.data else [], within=True)
        refuse_overlap(self.output, "model", [self.model])


def score(options: ScoreOptions, tell: Callable[[str], None] = lambda line: None) -> int:
    """Write the scores of a log or a split, and return their number; after an interruption, the same call resumes.

    Args:
        options: what to score, and where to write it.
        tell: called with each message.

    Raises:
        ValueError: if the model or the input is invalid, or they don't fit each other.
        OSError: if the output can't be written.
    """
    model = options.model, _checksums(options.model)  # first, so that all of the run is of one model
    metadata, given = read_metadata(options.model), options.inputs[0]
    folder = given if isinstance(given, Path) and given.is_dir() else None
    if folder:
        manifest = read_manifest(folder)
        check_vocabularies(metadata, manifest, folder)
        options, schema = _as_logs(options, manifest, folder)
        scorer, settings = partial(_score_rows, manifest), {"split": options.split}
    else:
        manifest = open_vocabularies(metadata, options.data).manifest
        data = options.data or Path(run_of(metadata).data)
        options = replace(options, data=data)  # which the output must not overlap either
        schema = Splitting().schema_used(schema_of_new_logs(manifest, data, given))
        encoder = open_encoder(manifest.integer_columns, manifest.categorical_columns, data, schema)
        scorer, settings = partial(_score_lines, encoder), {"data": str(data)}
    workers = min(options.threads, sum(count_parts(log, options.part_bytes) or 1 for log in options.inputs))
    identity = {"model": model[1]} | settings | {"part_bytes": options.part_bytes}
    with (
        _executor(workers) as executor,
        open_job(options, schema, Splitting(), files=None, identity=identity, tell=tell, executor=executor) as job,
    ):
        records = pass_over(job, partial(scorer, model), PartRecord, folder="shards", description="scoring")
        _join(job, records, first=0 if folder else job.first_line(0))
    return sum(part.rows for part in records)


def _as_logs(options: ScoreOptions, manifest: Manifest, folder: Path) -> tuple[ScoreOptions, LogSchema]:
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


_Model = tuple[Path, tuple[str, ...]]
"""The path of MODEL.pt2, and what `_checksums` says of it."""


def _checksums(model: Path) -> tuple[str, ...]:
    """Return the checksums of a package, and of the weights beside it, if there are some."""
    return tuple(file_sha256(path) for path in (model, model.with_suffix(".weights")) if path.exists())


def _score_lines(encoder: Encoder, model: _Model, job: Job, part: Part, _: None) -> PartRecord:
    parsed = job.parse(part)
    scores = _scores(model, (flatten(encoder, parsed, rows) for rows in in_pieces(slice(0, parsed.rows), _BATCH_ROWS)))
    line = parsed.starts - part.start
    if isinstance(part.content, bytes):
        newlines = np.flatnonzero(np.frombuffer(part.content, np.uint8) == ord("\n"))
        line = np.searchsorted(newlines, line) - (1 if job.schema.header and not part.start else 0)
    _save(job, part, {"line": line, **scores, **dict(zip(job.schema.labels, parsed.labels, strict=True))})
    return PartRecord.of(part, parsed)


def _score_rows(manifest: Manifest, model: _Model, job: Job, part: Part, _: None) -> PartRecord:
    table, rows = part.content, len(part.content)
    assert isinstance(table, pa.Table), "shards are Parquet"
    scores = _scores(model, (flat_rows(table.slice(start, _BATCH_ROWS), manifest) for start in range(0, rows, _BATCH_ROWS)))
    by_label = {label.name: table.column(label.name).to_numpy() for label in manifest.labels}
    _save(job, part, {"row": np.arange(rows), **scores, **by_label})
    return PartRecord(log=part.log, number=part.number, last=part.last, lines=rows, rows=rows)


@lru_cache(1)
def _load(path: Path, checksums: tuple[str, ...]) -> ServingModel:
    model = ServingModel(path, threads=1)
    model.update_from_beside()
    if _checksums(path) != checksums:
        raise UserError(f"{path}, or the weights beside it, changed while logs were scored: run the command again to start over")
    return model


def _scores(of_run: _Model, batches: Iterable[Flat]) -> dict[str, np.ndarray]:
    """Return the columns of scores: `score`, or `score_LABEL` for each of several labels."""
    model = _load(*of_run)
    with torch.inference_mode():
        scores = [model(*map(torch.from_numpy, batch))[0].numpy() for batch in batches]
    labels = run_of(model.metadata).labels
    names = [f"score_{label}" for label in labels] if len(labels) > 1 else ["score"]
    columns = [np.empty((len(labels), 0), np.float32), *(each.reshape(-1, len(labels)).T for each in scores)]
    return dict(zip(names, np.concatenate(columns, axis=1), strict=True))


@contextmanager
def _executor(workers: int) -> Iterator[Executor]:
    """Start workers: processes, because compiled models hold Python's lock, or a thread where one worker is enough.

    Processes inherit this module, because importing it takes seconds.
    """
    if workers <= 1:
        executor: Executor = ThreadPoolExecutor(1)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        executor = ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
    try:
        with executor:
            yield executor
    except BrokenProcessPool as error:
        raise UserError("a worker died, probably out of memory: lower `workers`, and run the command again to resume") from error


def _end_with_parent() -> None:
    """Let this process end when its parent does, or it would go on with queued parts, among those of the next run."""
    parent = multiprocessing.parent_process()
    assert parent, "this is a worker"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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
