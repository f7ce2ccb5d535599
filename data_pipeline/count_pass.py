"""Pass 1 over all logs: every part counted once, malformed lines within their limit, training rows apart from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

from data_pipeline.counts import GroupCounts, PartCounts, count_part
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import SPLITS, InputFile, RejectedLine
from data_pipeline.parse import Parsed
from data_pipeline.parts import Part
from data_pipeline.pool import Schedule, Work
from data_pipeline.runs import Counted, Run, merge, merge_in_levels
from data_pipeline.splits import Rows

_REJECTED_LINES_KEPT = 100
_NONE, _ALL = slice(0, 0), slice(None)


@dataclass(frozen=True, kw_only=True)
class CountedPart:
    """A part after pass 1: where its rows are among all rows, and what was counted in it.

    name: of its files of counts. They hold all rows as training rows where splits go by position, because a row's position is known
        only when all parts are counted; `train_and_rest` sets that right.
    """

    log: int
    number: int
    first_row: int
    name: str
    counts: PartCounts

    @property
    def end_row(self) -> int:
        return self.first_row + self.counts.rows


def count_logs(job: Job, schedule: Schedule) -> list[CountedPart]:
    """Count every part that isn't counted yet, and return all in order.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    parts, row = [], 0
    for log, counted in enumerate(pass_over(job, schedule, _count, PartCounts, folder="counts", description="counting")):
        for number, counts in counted.items():
            parts.append(CountedPart(log=log, number=number, first_row=row, name=part_name(log, number), counts=counts))
            row += counts.rows
    return parts


class PartRecord(Protocol):
    """What a pass that meets malformed lines records of a part; `PartCounts` says what the members are."""

    @property
    def lines(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def rejected(self) -> int: ...
    @property
    def reasons(self) -> tuple[tuple[int, str], ...]: ...
    @property
    def last(self) -> bool: ...


Record = TypeVar("Record", bound=PartRecord)


def pass_over(
    job: Job, schedule: Schedule, work: Work[tuple[int, int, Record]], kind: type[Record], *, folder: str, description: str
) -> list[dict[int, Record]]:
    """Work on every part that isn't done yet, and return for each log the records of all its parts, by number and in order.

    Args:
        job: the run.
        schedule: runs the pass.
        work: gives log, number and record of a part, and saves the record.
        kind: of record.
        folder: of the work folder, where records are saved.
        description: for the progress bar.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records_of_logs = [_done_before(job, log, kind, folder) for log in range(len(job.logs))]
    rejects = _Rejects(job)
    for log, records in enumerate(records_of_logs):
        rejects.check(log, records)
    waiting = {log: records.keys() for log, records in enumerate(records_of_logs) if not _complete(records)}
    done = sum(record.rows for records in records_of_logs for record in records.values())
    with (
        tqdm(desc=description, unit="row", unit_scale=True, disable=None, initial=done) as bar,
        closing(schedule(job, work, waiting, {})) as results,
    ):
        for part_log, number, record in results:
            bar.update(record.rows)
            records_of_logs[part_log][number] = record
            rejects.check(part_log, records_of_logs[part_log])
    return [dict(sorted(records.items())) for records in records_of_logs]


def _done_before(job: Job, log: int, kind: type[Record], folder: str) -> dict[int, Record]:
    paths = sorted((job.work.path / folder).glob(f"{log:05d}-??????.json"))
    numbers = [int(path.stem.partition("-")[2]) for path in paths]
    loaded = {number: job.work.load(f"{folder}/{part_name(log, number)}", kind) for number in numbers}
    return {number: record for number, record in loaded.items() if record}


def _complete(records: Mapping[int, PartRecord]) -> bool:
    return any(record.last and len(records) == number + 1 for number, record in records.items())


def _count(job: Job, part: Part, detail: None) -> tuple[int, int, PartCounts]:
    name = f"counts/{part_name(part.log, part.number)}"
    counts = job.work.load(name, PartCounts)
    if counts:  # by a worker that died before it could say so
        return part.log, part.number, counts
    drawn = np.zeros(len(SPLITS), np.int64)

    def rows_of(parsed: Parsed, first: int) -> tuple[Rows, Rows]:
        if not job.splitting.by_row:
            return _ALL, _NONE
        rows = job.rows_by_draw(part, parsed)
        drawn[:] += [len(of_split) for of_split in rows.values()]
        return rows["train"], np.sort(np.concatenate([rows["val"], rows["test"]]))

    counts = count_part(job.blocks(part), job.schema, job.work.path / name, rows_of=rows_of, last=part.last, counted=job.counted)
    if job.splitting.by_row:
        counts = replace(counts, split_rows=tuple(drawn.tolist()))
    job.work.save(name, counts)
    return part.log, part.number, counts


class _Rejects:
    """Stops the pass at one malformed line too many, once the parts before it in its log are counted, so that it has a number."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._count = 0
        self._checked = [0] * len(job.logs)  # parts of each log
        self._lines = [0] * len(job.logs)

    def check(self, log: int, records: Mapping[int, PartRecord]) -> None:
        most = self._job.options.max_bad_rows
        while counts := records.get(self._checked[log]):
            before, self._count = self._count, self._count + counts.rejected
            if self._count > most:
                nth = most - before
                known = nth < len(counts.reasons)
                line, reason = counts.reasons[nth] if known else self._job.malformed(log, self._checked[log], nth)
                number = self._job.first_line(log) + self._lines[log] + line
                others = f"after {most} other malformed lines; " if most else ""
                raise ValueError(
                    f"{self._job.options.inputs[log]}:{number}: {reason}; {others}"
                    "fix the log, or let lines be dropped with a higher --max-bad-rows"
                )
            self._checked[log] += 1
            self._lines[log] += counts.lines


def describe_inputs(job: Job, parts: Sequence[CountedPart]) -> tuple[tuple[InputFile, ...], tuple[RejectedLine, ...]]:
    """The logs as read, and the first of their malformed lines."""
    inputs: list[InputFile] = []
    rejected: list[RejectedLine] = []
    for log, identity in enumerate(job.logs):
        lines, malformed, first_line = 0, 0, job.first_line(log)
        for part in parts:
            if part.log == log:
                rejected += [
                    RejectedLine(file=identity.name, line=first_line + lines + line, reason=reason)
                    for line, reason in part.counts.reasons[: _REJECTED_LINES_KEPT - len(rejected)]
                ]
                lines += part.counts.lines
                malformed += part.counts.rejected
        inputs.append(InputFile(name=identity.name, bytes=identity.bytes, rows_in=lines, rows_rejected=malformed))
    return tuple(inputs), tuple(rejected)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a part that all train, or all don't, as counted."""

    counts: GroupCounts
    trains: bool

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of their values."""
        return tuple(replace(run, trains=self.trains) for run in self.counts.runs)


def train_and_rest(job: Job, parts: Sequence[CountedPart], train_rows: int) -> list[Group]:
    """Groups of all parts. Where splits go by position, a part that both trains and doesn't is counted again in two groups."""
    groups = []
    for part in parts:
        if job.splitting.by_row or part.end_row <= train_rows:
            flags = (True, False)
        elif part.first_row >= train_rows:
            flags = (False, False)
        else:
            part, flags = _count_apart(job, part, train_rows - part.first_row), (True, False)
        both = (part.counts.train, part.counts.rest)
        groups += [Group(counts=counts, trains=trains) for counts, trains in zip(both, flags, strict=True) if counts.rows]
    return groups


def _count_apart(job: Job, part: CountedPart, train_rows: int) -> CountedPart:
    name = f"{part.name}-apart"
    counts = job.work.load(f"counts/{name}", PartCounts)
    if counts is None:
        again = next(job.reader(part.log, lambda number: number != part.number)())
        counts = count_part(
            job.blocks(again),
            job.schema,
            job.work.path / "counts" / name,
            rows_of=lambda parsed, first: (slice(0, max(train_rows - first, 0)), slice(max(train_rows - first, 0), None)),
            last=part.counts.last,
            counted=job.counted,
        )
        job.work.save(f"counts/{name}", counts)
    return replace(part, name=name, counts=counts)


def merged_values(job: Job, groups: Sequence[Group]) -> Callable[[int], Iterator[Counted]]:
    """Merge the groups' runs in levels, and return what gives a categorical column's values and their counts in training rows."""
    folder = job.work.path / "counts"
    merging: dict[str, Any] = {"key_dtype": job.schema.key_dtype, "entries": job.options.merged_entries}
    all_runs = [run for group in groups for run in group.runs]
    runs = merge_in_levels(all_runs, job.work, folder, columns=len(job.schema.categories), workers=job.options.threads, **merging)
    return lambda column: merge(runs, folder, column, **merging)


def remove_runs(job: Job) -> None:
    """Remove the runs, once all vocabularies are recorded."""
    for pattern in ("*.keys", "*.counts"):
        for file in (job.work.path / "counts").glob(pattern):
            file.unlink()


def no_training_rows(parts: Sequence[CountedPart]) -> ValueError:
    """For --input without a row to train on."""
    rows = sum(part.counts.rows for part in parts)
    return ValueError(f"--input holds {rows} well-formed lines, which leaves no row for training; give more")
