"""Scores of a log, or of a split of a data set, as one Parquet file: in parts, so that memory is bounded and a killed run resumes.

Columns of the file: `line` of the log from 1, or `row` of the split from 0; `score`, the probability of a click, float32; `label`
where there are labels. Parts are those of `data_pipeline.parts` in a log, and the shards of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from comera_rec.serving.package import ServingModel
from comera_rec.serving.vocabularies import check_vocabularies, open_vocabularies
from data_pipeline.atomic import replacing
from data_pipeline.columns import LABEL
from data_pipeline.count_pass import first_line, pass_over
from data_pipeline.encoder import Flat, check_columns, flatten, new_logs_schema, open_encoder, recorded_log
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import Manifest, Shard, check_shards, file_sha256, read_manifest
from data_pipeline.options import PassOptions
from data_pipeline.parts import Part, identify, inputs_changed
from data_pipeline.pool import on_threads
from data_pipeline.shards import Encoder
from data_pipeline.splits import Splitting
from data_pipeline.triplets import Rows
from data_pipeline.verify import ids_of, read_row_groups
from data_pipeline.work import Tell, WorkFolder, work_folder

BATCH_ROWS = 4096  # of a call: few enough for the caches, enough that calls cost nothing
PART_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PassOptions):
    """What to score.

    Args:
        model: MODEL.pt2.
        data: folder of the data set whose vocabularies encode a log; None takes the one that the model was trained on.
        split: of an input that is a data set.
    """

    model: Path
    data: Path | None = None
    split: str = "test"
    part_bytes: int = PART_BYTES

    @property
    def input(self) -> Path | None:
        """The data set that is scored; None where a log is."""
        first = self.inputs[0]
        return first if isinstance(first, Path) and first.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class ScoredPart:
    """A part whose scores are on disk; members as in `PartRecord`."""

    lines: int
    rows: int
    rejected: int
    reasons: tuple[tuple[int, str], ...]
    last: bool


def score(options: ScoreOptions, tell: Tell = lambda line: None) -> int:
    """Write the scores and return how many there are. Interrupted, it resumes when it is called again.

    Args:
        options: what to do.
        tell: takes lines for people.

    Raises:
        ValueError: the model or the input is not what it should be, or they don't fit each other.
        OSError: the output cannot be written.
    """
    model = ServingModel.load(options.model, threads=options.threads)
    return _score_data_set(options, model, tell) if options.input else _score_log(options, model, tell)


def _score_log(options: ScoreOptions, model: ServingModel, tell: Tell) -> int:
    encoder = open_vocabularies(model.metadata, options.data)
    data = options.data or Path(model.metadata.data)
    logs = identify(options.inputs)
    known = recorded_log(encoder.manifest, data)
    schema = new_logs_schema(known, options.inputs[0])
    check_columns(schema, known, log=options.inputs[0], data=data)
    of_log = open_encoder(encoder.manifest, data, schema)
    identity = _identity(options) | {"input": [asdict(log) for log in logs], "data": str(data), "part_bytes": options.part_bytes}

    def score_part(job: Job, part: Part, detail: None) -> tuple[int, int, ScoredPart]:
        key = part_name(part.log, part.number)
        record = job.work.load(f"shards/{key}", ScoredPart)
        return part.log, part.number, record or _score_part(job, part, of_log, model)

    with work_folder(options.output, identity=identity, marker=None, overwrite=options.overwrite, tell=tell) as work:
        job = Job(options=options, schema=schema, logs=logs, work=work, splitting=Splitting())
        (records,) = pass_over(job, on_threads, score_part, ScoredPart, folder="shards", description="scoring")
        if identify(options.inputs) != logs:
            raise inputs_changed()
        _join(work, records, options.output, "line", first_line(job))
    return sum(record.rows for record in records.values())


def _score_part(job: Job, part: Part, encoder: Encoder, model: ServingModel) -> ScoredPart:
    parsed = job.parse(part)
    batches = (flatten(encoder, parsed, slice(start, start + BATCH_ROWS)) for start in range(0, parsed.rows, BATCH_ROWS))
    scores = np.concatenate([_call(model, batch) for batch in batches] or [np.empty(0, np.float32)])
    lines = parsed.starts - part.start
    if not isinstance(part.content, Rows):
        newlines = np.flatnonzero(np.frombuffer(part.content, np.uint8) == ord("\n"))
        lines = np.searchsorted(newlines, lines) - (1 if job.schema.header and not part.start else 0)
    columns = {"line": lines, "score": scores} | ({LABEL: parsed.label} if job.schema.labelled else {})
    record = ScoredPart(lines=parsed.lines, rows=parsed.rows, rejected=parsed.rejected, reasons=parsed.reasons, last=part.last)
    _save(job.work, part_name(part.log, part.number), columns, record)
    return record


def _score_data_set(options: ScoreOptions, model: ServingModel, tell: Tell) -> int:
    folder = options.input
    assert folder is not None
    manifest = read_manifest(folder)
    check_vocabularies(model.metadata, manifest, folder)
    if options.split not in manifest.splits:
        raise ValueError(f"--split is {options.split!r}; choose one of {', '.join(manifest.splits)}")
    shards = manifest.splits[options.split].shards
    if not shards:
        raise ValueError(f"split {options.split} of {folder} is empty; choose another with --split")
    check_shards(manifest, folder)
    identity = _identity(options) | {"input": [shard.sha256 for shard in shards], "split": options.split}
    with (
        work_folder(options.output, identity=identity, marker=None, overwrite=options.overwrite, tell=tell) as work,
        ThreadPoolExecutor(options.threads) as pool,
        tqdm(desc="scoring", total=manifest.splits[options.split].rows, unit="row", unit_scale=True, disable=None) as bar,
    ):

        def score_shard(number: int) -> ScoredPart:
            name = part_name(0, number)
            record = work.load(f"shards/{name}", ScoredPart) or _score_shard(work, name, shards[number], folder, manifest, model)
            bar.update(record.rows)
            return record

        records = dict(enumerate(pool.map(score_shard, range(len(shards)))))
        _join(work, records, options.output, "row", 0)
    return sum(record.rows for record in records.values())


def _score_shard(work: WorkFolder, name: str, shard: Shard, folder: Path, manifest: Manifest, model: ServingModel) -> ScoredPart:
    scores, labels = [], []
    for _, group in read_row_groups(folder / shard.path):
        for start in range(0, len(group), BATCH_ROWS):
            scores.append(_call(model, _flat(group.slice(start, BATCH_ROWS), manifest)))
        if manifest.label:
            labels.append(group.column(LABEL).to_numpy())
    columns = {"row": np.arange(shard.rows), "score": np.concatenate(scores)}
    record = ScoredPart(lines=shard.rows, rows=shard.rows, rejected=0, reasons=(), last=False)
    _save(work, name, columns | ({LABEL: np.concatenate(labels)} if manifest.label else {}), record)
    return record


def _flat(rows: pa.Table, manifest: Manifest) -> Flat:
    """Rows of a shard as a model takes them."""
    dense = np.stack([rows.column(column.name).to_numpy() for column in manifest.integer_columns], axis=1)
    columns = manifest.categorical_columns
    lengths = np.ones((len(columns), len(rows)), np.int32)
    for of_column, column in zip(lengths, columns, strict=True):
        if column.is_list:
            of_column[:] = np.diff(rows.column(column.name).combine_chunks().offsets.to_numpy())
    values = [ids_of(rows, column.name, is_list=column.is_list) for column in columns]
    return Flat(dense, np.concatenate(values, dtype=np.int64), lengths.ravel())


def _call(model: ServingModel, batch: Flat) -> np.ndarray:
    with torch.inference_mode():
        return model(*map(torch.from_numpy, batch)).numpy()


def _identity(options: ScoreOptions) -> dict[str, object]:
    if not options.model.is_file():
        raise ValueError(f"{options.model} is not there: give a MODEL.pt2 that `comera export` wrote")
    return {"model": file_sha256(options.model)}


def _save(work: WorkFolder, name: str, columns: Mapping[str, np.ndarray], record: ScoredPart) -> None:
    with replacing(work.data / f"{name}.parquet") as beside:
        pq.write_table(pa.table(dict(columns)), beside)
    work.save(f"shards/{name}", record)


def _join(work: WorkFolder, records: Mapping[int, ScoredPart], output: Path, counter: str, first: int) -> None:
    """All parts as one file, their lines or rows counted on from `first`."""

    def tables() -> Iterator[pa.Table]:
        before = first
        for number, record in records.items():
            table = pq.read_table(work.data / f"{part_name(0, number)}.parquet")
            yield table.set_column(0, counter, pa.array(table.column(0).to_numpy() + before))
            before += record.lines

    with replacing(work.data / output.name) as beside:
        writer = None
        for table in tables():
            writer = writer or pq.ParquetWriter(beside, table.schema)
            writer.write_table(table)
        assert writer is not None, "a log has a part, and a split shards"
        writer.close()
