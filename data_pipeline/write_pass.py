"""Pass 2 over all logs: every part encoded and written to the shards that its rows belong to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

from tqdm import tqdm

from data_pipeline.count_pass import CountedPart
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import SPLITS, Shard
from data_pipeline.parts import Part
from data_pipeline.pool import work_on_parts
from data_pipeline.shards import Encoder, PartShards, WrittenShard, write_part
from data_pipeline.splits import Rows, rows_by_place


def write_logs(job: Job, parts: Sequence[CountedPart], bounds: tuple[int, int], encoder: Encoder) -> dict[str, list[WrittenShard]]:
    """Write every part that isn't written yet, and return all shards of each split in order.

    Args:
        job: the run.
        parts: all parts in order.
        bounds: the first rows of validation and test, where splits go by place.
        encoder: of the columns.
    """
    planned = _plan(job, parts, bounds)
    found = {}
    for key in planned:
        shards = job.work.load(f"shards/{part_name(*key)}", PartShards)
        if shards and all(_is_there(job, written.shard) for written in shards.written):
            found[key] = shards
    waiting = planned.keys() - found.keys()
    first_rows = {(part.log, part.number): part.first_row for part in parts}

    def write(part: Part) -> tuple[tuple[int, int], PartShards]:
        key = part.log, part.number
        parsed = job.parse(part)
        by_place = job.options.split != "random"
        rows: Mapping[str, Rows] = (
            rows_by_place(first_rows[key], parsed.rows, bounds) if by_place else job.rows_by_draw(part, parsed)
        )
        shards = write_part(parsed, encoder, job.work.data, rows=rows, shards=planned[key])
        job.work.save(f"shards/{part_name(*key)}", shards)
        return key, shards

    def reader(log: int) -> Callable[[], Iterator[Part]]:
        return job.reader(log, lambda number: (log, number) not in waiting)

    readers = [reader(log) for log in sorted({log for log, _ in waiting})]
    total = sum(part.counts.rows for part in parts)
    with (
        tqdm(desc="writing", total=total, unit="row", unit_scale=True, disable=None, initial=_rows(list(found.values()))) as bar,
        closing(work_on_parts(readers, write, workers=job.options.threads)) as results,
    ):
        for key, shards in results:
            bar.update(_rows([shards]))
            found[key] = shards
    by_split = defaultdict(list)
    for key in sorted(found):
        for written in found[key].written:
            by_split[written.split].append(written)
    return by_split


def _plan(job: Job, parts: Sequence[CountedPart], bounds: tuple[int, int]) -> dict[tuple[int, int], dict[str, Shard]]:
    """For every part that has rows, the shard of each split that has some of them; numbered in order within the split."""
    planned: dict[tuple[int, int], dict[str, Shard]] = {}
    numbers = Counter[str]()
    for part in parts:
        if job.options.split == "random":
            sizes = dict(zip(SPLITS, part.counts.split_rows or (), strict=True))
        else:
            sizes = {
                split: rows.stop - rows.start for split, rows in rows_by_place(part.first_row, part.counts.rows, bounds).items()
            }
        for split, rows in sizes.items():
            if rows:
                shard = Shard(
                    path=f"{split}/part-{numbers[split]:05d}.parquet", rows=rows, from_rows=(part.first_row, part.end_row)
                )
                planned.setdefault((part.log, part.number), {})[split] = shard
                numbers[split] += 1
    return planned


def _is_there(job: Job, shard: Shard) -> bool:
    path = job.work.data / shard.path
    return path.exists() and path.stat().st_size == shard.bytes


def _rows(parts: Sequence[PartShards]) -> int:
    return sum(written.shard.rows for shards in parts for written in shards.written)
