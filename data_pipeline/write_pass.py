"""Pass 2 over all logs: encodes every part and writes it to the shards that its rows belong to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from data_pipeline.count_pass import CountedPart, describe_inputs
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import SPLITS, CategoricalColumn, Label, RowCounts, Shard, Split, Weight, versions
from data_pipeline.parse import Parsed
from data_pipeline.parts import Part
from data_pipeline.pool import Schedule
from data_pipeline.schema import LogSchema
from data_pipeline.shards import Encoder, WrittenShard, write_part
from data_pipeline.splits import Rows, rows_by_position


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """A part's shards by split, its first row, and the first rows of validation and test if splits go by position."""

    shards: Mapping[str, Shard]
    first_row: int
    bounds: tuple[int, int]


def write_logs(
    job: Job, schedule: Schedule, parts: Sequence[CountedPart], bounds: tuple[int, int], encoder: Encoder
) -> dict[str, list[WrittenShard]]:
    """Write every part that has not been written yet, and return all shards of each split in order.

    Args:
        bounds: the numbers of the first validation and test rows, if splits go by position.
    """
    planned = _plan(job, parts, bounds)
    records = {key: shards for key in planned if (shards := _load_shards(job, key))}
    waiting = planned.keys() - records.keys()
    done: dict[int, set[int]] = {log: set() for log, _ in waiting}
    for part in parts:
        if part.log in done and (part.log, part.number) not in waiting:
            done[part.log].add(part.number)
    total = sum(part.counts.rows for part in parts)
    with (
        tqdm(desc="writing", total=total, unit="row", unit_scale=True, disable=None, initial=_rows(records.values())) as bar,
        closing(schedule(job, partial(_write, encoder), done, planned)) as results,
    ):
        for key, shards in results:
            bar.update(_rows([shards]))
            records[key] = shards
    by_split = defaultdict(list)
    for key in sorted(records):
        for written in records[key]:
            by_split[written.split].append(written)
    return by_split


def describe_rows(job: Job, parts: Sequence[CountedPart], written: Mapping[str, Sequence[WrittenShard]]) -> dict[str, Any]:
    """Return what the manifest says of all rows: the logs and their rejected lines, versions, labels, weights and splits."""
    inputs, rejected_lines = describe_inputs(job, parts)
    rejected, rows = sum(log.rows_rejected for log in inputs), sum(part.counts.rows for part in parts)
    shards = {name: tuple(record.shard for record in written[name]) for name in SPLITS}
    return {
        "versions": versions(),
        "inputs": inputs,
        "rows": RowCounts(read=rows + rejected, written=rows, rejected=rejected),
        "rejected_lines": rejected_lines,
        **_targets(written, job.schema),
        "splits": {name: Split(rows=sum(shard.rows for shard in split), shards=split) for name, split in shards.items()},
        "log": job.schema,
    }


def _targets(written: Mapping[str, Sequence[WrittenShard]], schema: LogSchema) -> dict[str, Any]:
    """Return the labels' and weights' records for the manifest."""
    rows = {split: sum(shard.shard.rows for shard in written[split]) for split in SPLITS}

    def means(sum_of: Callable[[WrittenShard], float]) -> dict[str, Any]:
        sums = {split: sum(map(sum_of, written[split])) for split in SPLITS}
        split_means = {split: sums[split] / rows[split] if rows[split] else None for split in SPLITS}
        return {"mean": sum(sums.values()) / sum(rows.values()), "split_means": split_means}

    def positives_of(number: int) -> Callable[[WrittenShard], float]:
        return lambda shard: shard.positives[number]

    labels = [Label(name=name, **means(positives_of(number))) for number, name in enumerate(schema.labels)]
    weight = Weight(name=schema.weight, **means(lambda shard: shard.weight)) if schema.weight else None
    return {"label": labels[0] if labels else None, "other_labels": tuple(labels[1:]), "weight": weight}


def count_zeros(
    columns: tuple[CategoricalColumn, ...], written: Mapping[str, Sequence[WrittenShard]]
) -> tuple[CategoricalColumn, ...]:
    """Return the categorical columns with how many ids of each split are 0."""

    def zeros(number: int) -> dict[str, int]:
        return {split: sum(shard.zeros[number] for shard in written[split]) for split in SPLITS}

    return tuple(replace(column, rows_at_zero=zeros(number)) for number, column in enumerate(columns))


def _write(encoder: Encoder, job: Job, part: Part, planned: PlannedPart) -> tuple[tuple[int, int], tuple[WrittenShard, ...]]:
    key = part.log, part.number
    shards = _load_shards(job, key)
    if not shards:

        def rows_of(parsed: Parsed, first: int) -> Mapping[str, Rows]:
            if job.splitting.by_row:
                return job.rows_by_draw(part, parsed)
            return rows_by_position(planned.first_row + first, parsed.rows, planned.bounds)

        shards = write_part(job.blocks(part), encoder, job.work.data, rows_of=rows_of, shards=planned.shards)
        job.work.save(f"shards/{part_name(*key)}", shards)
    return key, shards


def _load_shards(job: Job, key: tuple[int, int]) -> tuple[WrittenShard, ...] | None:
    shards = job.work.load(f"shards/{part_name(*key)}", tuple[WrittenShard, ...])
    return shards if shards and all(_is_complete(job, written.shard) for written in shards) else None


def _plan(job: Job, parts: Sequence[CountedPart], bounds: tuple[int, int]) -> dict[tuple[int, int], PlannedPart]:
    """Plan the shards of every part that has rows, one for each of their splits, numbered in order within the split."""
    planned: dict[tuple[int, int], PlannedPart] = {}
    numbers = Counter[str]()
    for part in parts:
        if job.splitting.by_row:
            sizes = dict(zip(SPLITS, part.counts.split_rows or (), strict=True))
        else:
            by_position = rows_by_position(part.first_row, part.counts.rows, bounds)
            sizes = {split: rows.stop - rows.start for split, rows in by_position.items()}
        shards = {}
        for split, rows in sizes.items():
            if rows:
                path = f"{split}/part-{numbers[split]:05d}.parquet"
                shards[split] = Shard(path=path, rows=rows, from_rows=(part.first_row, part.end_row))
                numbers[split] += 1
        if shards:
            planned[part.log, part.number] = PlannedPart(shards=shards, first_row=part.first_row, bounds=bounds)
    return planned


def _is_complete(job: Job, shard: Shard) -> bool:
    path = job.work.data / shard.path
    return path.exists() and path.stat().st_size == shard.bytes


def _rows(parts: Iterable[Sequence[WrittenShard]]) -> int:
    return sum(written.shard.rows for shards in parts for written in shards)
