"""Scores of a log, or of a split of a data set, in one Parquet file; made in parts to bound memory and let a killed run resume.

Columns of the file: `line` of the log from 1, or `row` of the split from 0; `score`, the probability of label 1, float32, or
`score_LABEL` for each of several labels; the labels themselves if there are any. Parts of a log are those of
`data_pipeline.parts`; parts of a split are its row groups.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from comera_rec.serving.package import ServingModel, read_metadata
from comera_rec.serving.vocabularies import check_vocabularies, open_vocabularies, run_of
from data_pipeline.atomic import refuse_overlap, replacing
from data_pipeline.count_pass import pass_over
from data_pipeline.encoder import Flat, check_columns, flatten, new_logs_schema, open_encoder, recorded_log
from data_pipeline.errors import UserError
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import Manifest, check_shards, file_sha256, read_manifest
from data_pipeline.options import PassOptions
from data_pipeline.parse import PartRecord
from data_pipeline.parts import Part, check_layout, count_parts, inputs_changed
from data_pipeline.pool import on_executor
from data_pipeline.shards import Encoder
from data_pipeline.sources import identify_log
from data_pipeline.splits import Splitting
from data_pipeline.verify import ids_of
from data_pipeline.work import Tell, WorkFolder, work_folder

BATCH_ROWS = 512  # rows of a call: few enough to fit the caches, enough to amortize the call
PART_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PassOptions):
    """Options of scoring.

    Args:
        model: MODEL.pt2.
        data: folder of the data set whose vocabularies encode a log; None takes the one that the model was trained on.
        split: split to score if the input is a data set.
        part_bytes: bytes of a part of a log.
    """

    model: Path
    data: Path | None = None
    split: str = "test"
    part_bytes: int = PART_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "model", [self.model])
        refuse_overlap(self.output, "input", self.inputs, within=True)
        refuse_overlap(self.output, "data", [self.data] if self.data else [], within=True)

    @property
    def folder(self) -> Path | None:
        """Folder of the data set to score; None if the input is a log."""
        first = self.inputs[0]
        return first if isinstance(first, Path) and first.is_dir() else None


@dataclass(kw_only=True)
class ScoredPart(PartRecord):
    """Record of a part whose scores are on disk, with the seconds of the worker."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rows written, and rows per second of all workers together, without the time to load the model."""

    rows: int
    rows_per_second: float


def score(options: ScoreOptions, tell: Tell = lambda line: None) -> Scored:
    """Write the scores of a log or a split; after an interruption, the same call resumes.

    Args:
        options: what to score, and where to write it.
        tell: called with each message.

    Raises:
        ValueError: if the model or the input is invalid, or they don't fit each other.
        OSError: if the output can't be written.
    """
    return _score_data_set(options, tell) if options.folder else _score_log(options, tell)


def _score_log(options: ScoreOptions, tell: Tell) -> Scored:
    metadata = read_metadata(options.model)
    encoder = open_vocabularies(metadata, options.data)
    data = options.data or Path(run_of(metadata).data)
    logs = tuple(map(identify_log, options.inputs))
    known = recorded_log(encoder.manifest, data)
    schema = new_logs_schema(known, options.inputs[0])
    check_columns(schema, known, log=options.inputs[0], data=data)
    layouts = tuple(check_layout(log, schema) for log in options.inputs)
    schema = Splitting().schema_used(schema)
    work_on = partial(
        _score_part,
        open_encoder(encoder.manifest.integer_columns, encoder.manifest.categorical_columns, data, schema),
        options.model,
    )
    identity = _identity(options) | {"input": [asdict(log) for log in logs], "data": str(data), "part_bytes": options.part_bytes}
    units = count_parts(options.inputs[0], options.part_bytes) or 1
    with (
        work_folder(options.output, identity=identity, files=None, overwrite=options.overwrite, tell=tell) as work,
        _executor(min(options.threads, units)) as executor,
    ):
        job = Job(options=options, schema=schema, logs=logs, work=work, splitting=Splitting(), layouts=layouts)
        schedule = partial(on_executor, executor)
        (records,) = pass_over(job, schedule, work_on, ScoredPart, folder="shards", description="scoring")
        if tuple(map(identify_log, options.inputs)) != logs:
            raise inputs_changed()
        _join(work, records, options.output, "line", job.first_line(0))
    return _scored(records, min(options.threads, units))


def _score_part(encoder: Encoder, model: Path, job: Job, part: Part) -> ScoredPart:
    _load(model)
    start = time.perf_counter()
    starts, labels = [np.empty(0, np.int64)], [np.empty((len(job.schema.labels), 0), np.int8)]
    record = PartRecord(last=part.last)

    def batches() -> Iterator[Flat]:
        for parsed in job.blocks(part):
            starts.append(parsed.starts)
            labels.append(parsed.labels)
            record.add(parsed)
            yield from (flatten(encoder, parsed, slice(at, at + BATCH_ROWS)) for at in range(0, parsed.rows, BATCH_ROWS))

    scores = _scores(model, batches())
    line = np.concatenate(starts) - part.start
    if isinstance(part.content, bytearray):
        newlines = np.flatnonzero(np.frombuffer(part.content, np.uint8) == ord("\n"))
        line = np.searchsorted(newlines, line) - (1 if job.schema.header and not part.start else 0)
    columns = {"line": line} | scores | dict(zip(job.schema.labels, np.concatenate(labels, axis=1), strict=True))
    seconds = time.perf_counter() - start
    _save(job.work, part_name(part.log, part.number), columns)
    return ScoredPart(**vars(record), seconds=seconds)


def _score_data_set(options: ScoreOptions, tell: Tell) -> Scored:
    folder = options.folder
    assert folder is not None
    manifest = read_manifest(folder)
    check_vocabularies(read_metadata(options.model), manifest, folder)
    if options.split not in manifest.splits:
        raise UserError(f"--split is {options.split!r}; choose one of {', '.join(manifest.splits)}")
    shards = manifest.splits[options.split].shards
    if not shards:
        raise UserError(f"split {options.split} of {folder} is empty; choose another with --split")
    check_shards(manifest, folder)
    paths = [folder / shard.path for shard in shards]
    groups = [(path, group) for path in paths for group in range(pq.read_metadata(path).num_row_groups)]
    identity = _identity(options) | {"input": [shard.sha256 for shard in shards], "split": options.split}
    with (
        work_folder(options.output, identity=identity, files=None, overwrite=options.overwrite, tell=tell) as work,
        _executor(min(options.threads, len(groups))) as executor,
        tqdm(desc="scoring", total=manifest.splits[options.split].rows, unit="row", unit_scale=True, disable=None) as bar,
    ):
        records: dict[int, ScoredPart] = {}
        for record in executor.map(partial(_score_group, work, manifest, options.model), *zip(*enumerate(groups), strict=True)):
            records[len(records)] = record
            bar.update(record.rows)
        _join(work, records, options.output, "row", 0)
    return _scored(records, min(options.threads, len(groups)))


def _scored(records: Mapping[int, ScoredPart], workers: int) -> Scored:
    rows, seconds = sum(record.rows for record in records.values()), sum(record.seconds for record in records.values())
    return Scored(rows=rows, rows_per_second=rows * workers / max(seconds, 1e-9))


def _score_group(work: WorkFolder, manifest: Manifest, model: Path, number: int, where: tuple[Path, int]) -> ScoredPart:
    """Score a row group of a shard."""
    name = part_name(0, number)
    record = work.load(f"shards/{name}", ScoredPart)
    if record:
        return record
    _load(model)
    start = time.perf_counter()
    path, group = where
    with pq.ParquetFile(path, memory_map=True) as file:
        table = file.read_row_group(group, use_threads=False)
    rows = len(table)
    scores = _scores(model, (flat_rows(table.slice(start, BATCH_ROWS), manifest) for start in range(0, rows, BATCH_ROWS)))
    columns = {"row": np.arange(rows)} | scores
    record = ScoredPart(lines=rows, rows=rows, last=False, seconds=time.perf_counter() - start)
    _save(work, name, columns | {label.name: table.column(label.name).to_numpy() for label in manifest.labels})
    work.save(f"shards/{name}", record)
    return record


@contextmanager
def _executor(workers: int) -> Iterator[Executor]:
    """Start workers: processes, because the compiled model holds Python's lock, or a thread where one worker is enough."""
    if workers <= 1:
        executor: Executor = ThreadPoolExecutor(1)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports take seconds; workers inherit them
        executor = ProcessPoolExecutor(workers, context)
    with executor:
        yield executor


@cache
def _load(model: Path) -> ServingModel:
    return ServingModel(model, threads=1)


def _scores(path: Path, batches: Iterable[Flat]) -> dict[str, np.ndarray]:
    """Return the columns of scores: `score`, or `score_LABEL` for each of several labels."""
    model = _load(path)
    with torch.inference_mode():
        scores = [model(*map(torch.from_numpy, batch))[0].numpy() for batch in batches]
    labels = run_of(model.metadata).labels
    whole = np.concatenate([np.empty((0, len(labels))[: 1 if len(labels) == 1 else 2], np.float32), *scores])
    if whole.ndim == 1:
        return {"score": whole}
    return {f"score_{label}": column for label, column in zip(labels, whole.T, strict=True)}


def flat_rows(rows: pa.Table, manifest: Manifest) -> Flat:
    """Convert rows of a shard to a model's inputs."""
    dense = np.empty((len(rows), len(manifest.integer_columns)), np.float32)
    for number, integer_column in enumerate(manifest.integer_columns):
        dense[:, number] = rows.column(integer_column.name).to_numpy()
    columns = manifest.categorical_columns
    lengths = np.ones((len(columns), len(rows)), np.int32)
    for column_lengths, column in zip(lengths, columns, strict=True):
        if column.is_list:
            column_lengths[:] = np.diff(rows.column(column.name).combine_chunks().offsets.to_numpy())
    values = [ids_of(rows, column.name, is_list=column.is_list) for column in columns]
    return Flat(dense, np.concatenate([np.empty(0, np.int64), *values], dtype=np.int64), lengths.ravel())


def _identity(options: ScoreOptions) -> dict[str, object]:
    return {"model": file_sha256(options.model)}


def _save(work: WorkFolder, name: str, columns: Mapping[str, np.ndarray]) -> None:
    with replacing(work.data / f"{name}.parquet") as beside:
        pq.write_table(pa.table(dict(columns)), beside)


def _join(work: WorkFolder, records: Mapping[int, ScoredPart], output: Path, counter: str, first: int) -> None:
    """Join all parts in one file, and number their lines or rows from `first` on."""
    before, writer = first, None
    with replacing(work.data / output.name) as beside:
        for number, record in records.items():
            table = pq.read_table(work.data / f"{part_name(0, number)}.parquet")
            table = table.set_column(0, counter, pa.array(table.column(0).to_numpy() + before))
            before += record.lines
            writer = writer or pq.ParquetWriter(beside, table.schema)
            writer.write_table(table)
        assert writer is not None, "a log has a part, and a split shards"
        writer.close()
