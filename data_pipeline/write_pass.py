"""Pass 2 over all logs: encodes every part and writes it to the shards that its rows belong to."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.atomic import replacing
from data_pipeline.count_pass import PartCounts, describe_inputs
from data_pipeline.encoder import open_encoder
from data_pipeline.errors import UserError
from data_pipeline.job import Job
from data_pipeline.manifest import (
    SPLITS,
    CategoricalColumn,
    IntegerColumn,
    RowCounts,
    Shard,
    Split,
    Target,
    describe_file,
    versions,
)
from data_pipeline.parse import Parsed
from data_pipeline.parts import Part, inputs_changed
from data_pipeline.passes import Key, PartRecord, pass_over
from data_pipeline.schema import LogSchema
from data_pipeline.shards import Encoder
from data_pipeline.splits import Rows

Planned = tuple[int, dict[str, Shard]]  # the number of a part's first row, and its shards by split


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A shard of a split, the sum of each label, the count of id 0 in each categorical column, and the sum of the weights."""

    split: str
    shard: Shard
    positives: tuple[int, ...]
    zeros: tuple[int, ...]
    weight: float = 0.0


@dataclass(kw_only=True)
class WrittenPart(PartRecord):
    """A part whose shards are on disk."""

    shards: tuple[WrittenShard, ...]


def write_logs(
    job: Job,
    parts: Sequence[PartCounts],
    integers: tuple[IntegerColumn, ...],
    categories: tuple[CategoricalColumn, ...],
) -> dict[str, Any]:
    """Write every part that has not been written yet, and return what the manifest says of the logs, columns, rows and splits.

    Args:
        categories: all but how many ids are 0.
    """
    encoder = open_encoder(integers, categories, job.work.data, job.schema, **job.options.table_room)
    work, planned, rows = partial(_write, encoder), _plan(parts), sum(part.rows for part in parts)
    records = pass_over(job, work, WrittenPart, folder="shards", description="writing", details=planned, total=rows)
    written: dict[str, list[WrittenShard]] = {split: [] for split in SPLITS}
    for record in records:
        for shard in record.shards:
            path = job.work.data / shard.shard.path
            if not path.exists() or path.stat().st_size != shard.shard.bytes:
                raise UserError(f"{path} is missing or damaged: remove {job.work.data.parent} to start over")
            written[shard.split].append(shard)
    inputs, rejected_lines = describe_inputs(job, parts)
    rejected = sum(log.rows_rejected for log in inputs)
    shards = {split: tuple(record.shard for record in of_split) for split, of_split in written.items()}
    zeros = [{split: sum(shard.zeros[c] for shard in written[split]) for split in SPLITS} for c in range(len(categories))]
    return {
        "versions": versions(),
        "inputs": inputs,
        "rows": RowCounts(read=rows + rejected, written=rows, rejected=rejected),
        "rejected_lines": rejected_lines,
        **_targets(written, job.schema),
        "integer_columns": integers,
        "categorical_columns": tuple(replace(column, rows_at_zero=by) for column, by in zip(categories, zeros, strict=True)),
        "splits": {name: Split(rows=sum(shard.rows for shard in split), shards=split) for name, split in shards.items()},
        "log": job.schema,
    }


def _targets(written: Mapping[str, Sequence[WrittenShard]], schema: LogSchema) -> dict[str, Any]:
    """Return the labels' and weights' records for the manifest."""
    rows = {split: sum(shard.shard.rows for shard in written[split]) for split in SPLITS}

    def target(name: str, sum_of: Callable[[WrittenShard], float]) -> Target:
        sums = {split: sum(map(sum_of, written[split])) for split in SPLITS}
        means = {split: sums[split] / rows[split] if rows[split] else None for split in SPLITS}
        return Target(name=name, mean=sum(sums.values()) / sum(rows.values()), split_means=means)

    labels = [target(name, lambda shard, n=number: shard.positives[n]) for number, name in enumerate(schema.labels)]  # type: ignore[misc]
    weight = target(schema.weight, lambda shard: shard.weight) if schema.weight else None
    return {"label": labels[0] if labels else None, "other_labels": tuple(labels[1:]), "weight": weight}


def _write(encoder: Encoder, job: Job, part: Part, planned: Planned | None) -> WrittenPart:
    if planned is None:  # the log has grown
        raise inputs_changed()
    first_row, shards = planned
    parsed = job.parse(part)
    by_split = job.rows_by_split(part, parsed, first_row)
    for split, rows in by_split.items():
        if len(parsed.starts[rows]) != (shards[split].rows if split in shards else 0):
            raise inputs_changed()
    written = tuple(_write_shard(encoder, job.work.data, split, shard, parsed, by_split[split]) for split, shard in shards.items())
    return WrittenPart(**vars(PartRecord.of(part, parsed)), shards=written)


def _write_shard(encoder: Encoder, data: Path, split: str, shard: Shard, parsed: Parsed, rows: Rows) -> WrittenShard:
    with replacing(data / shard.path) as temporary:
        zeros = encoder.write(temporary, parsed, rows)
    return WrittenShard(
        split=split,
        shard=describe_file(shard.path, data, rows=shard.rows),
        positives=tuple(parsed.labels[:, rows].sum(axis=1, dtype=np.int64).tolist()),
        zeros=tuple(zeros.tolist()),
        weight=0.0 if parsed.weights is None else float(parsed.weights[rows].sum(dtype=np.float64)),
    )


def _plan(parts: Sequence[PartCounts]) -> dict[Key, Planned]:
    """Plan the shards of every part, one for each of the splits that its rows belong to, numbered in order within the split."""
    planned: dict[Key, Planned] = {}
    numbers = Counter[str]()
    for part in parts:
        shards = {}
        for split, rows in zip(SPLITS, part.split_rows, strict=True):
            if rows:
                shards[split] = Shard(path=f"{split}/part-{numbers[split]:05d}.parquet", rows=rows)
                numbers[split] += 1
        planned[part.key] = part.first_row, shards
    return planned
