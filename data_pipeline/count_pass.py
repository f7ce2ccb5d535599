"""Pass 1 over all logs: counts each part once, limits malformed lines, and separates training rows from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from data_pipeline.counts import GroupCounts, PartCounts, count_part
from data_pipeline.errors import UserError
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import SPLITS, InputFile, RejectedLine
from data_pipeline.parse import Parsed, PartRecord
from data_pipeline.parts import Part, parquet_names
from data_pipeline.pool import Schedule
from data_pipeline.splits import Rows, Splitting

_REJECTED_LINES_KEPT = 100
_QUANTILES = 1024
_NO_ROWS, _ALL_ROWS = slice(0, 0), slice(None)


@dataclass(frozen=True, kw_only=True)
class CountedPart:
    """A part after pass 1: the number of its first row among all rows, and its counts.

    If splits go by position, all its rows are counted as training rows, because positions are known only after all parts are
    counted; `train_and_rest` corrects that.
    """

    log: int
    number: int
    first_row: int
    counts: PartCounts

    @property
    def end_row(self) -> int:
        return self.first_row + self.counts.rows


def count_logs(job: Job, schedule: Schedule) -> list[CountedPart]:
    """Count every part that has not been counted yet, and return all parts in order.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    parts, row = [], 0
    for log, counted in enumerate(pass_over(job, schedule, _count, PartCounts, folder="counts", description="counting")):
        for number, counts in counted.items():
            parts.append(CountedPart(log=log, number=number, first_row=row, counts=counts))
            row += counts.rows
    return parts


Record = TypeVar("Record", bound=PartRecord)


def pass_over(
    job: Job, schedule: Schedule, work: Callable[[Job, Part], Record], kind: type[Record], *, folder: str, description: str
) -> list[dict[int, Record]]:
    """Run a pass over every part that is not done yet, and return each log's records by part number, in order.

    Args:
        work: makes a part's record, which is of type `kind` and is saved in `folder` of the work folder.
        description: for the progress bar.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records_of_logs = [_load_records(job, log, kind, folder) for log in range(len(job.logs))]
    rejects = _Rejects(job)
    for log, records in enumerate(records_of_logs):
        rejects.check(log, records)
    done_parts = {log: records.keys() for log, records in enumerate(records_of_logs) if not _is_complete(records)}
    rows_done = sum(record.rows for records in records_of_logs for record in records.values())
    with (
        tqdm(desc=description, unit="row", unit_scale=True, disable=None, initial=rows_done) as bar,
        closing(schedule(job, partial(_recorded, work, kind, folder), done_parts, {})) as results,
    ):
        for part_log, number, record in results:
            bar.update(record.rows)
            records_of_logs[part_log][number] = record
            rejects.check(part_log, records_of_logs[part_log])
    return [dict(sorted(records.items())) for records in records_of_logs]


def _recorded(
    work: Callable[[Job, Part], Record], kind: type[Record], folder: str, job: Job, part: Part, detail: None
) -> tuple[int, int, Record]:
    name = f"{folder}/{part_name(part.log, part.number)}"
    record = job.work.load(name, kind)
    if record is None:  # otherwise a worker saved it and died before it could report it
        record = work(job, part)
        job.work.save(name, record)
    return part.log, part.number, record


def _load_records(job: Job, log: int, kind: type[Record], folder: str) -> dict[int, Record]:
    paths = sorted((job.work.path / folder).glob(f"{log:05d}-??????.json"))
    numbers = [int(path.stem.partition("-")[2]) for path in paths]
    loaded = {number: job.work.load(f"{folder}/{part_name(log, number)}", kind) for number in numbers}
    return {number: record for number, record in loaded.items() if record}


def _is_complete(records: Mapping[int, PartRecord]) -> bool:
    return any(record.last and len(records) == number + 1 for number, record in records.items())


def _count(job: Job, part: Part) -> PartCounts:
    drawn = np.zeros(len(SPLITS), np.int64)

    def rows_of(parsed: Parsed, first: int) -> tuple[Rows, Rows]:
        if not job.splitting.by_row:
            return _ALL_ROWS, _NO_ROWS
        rows = job.rows_by_draw(part, parsed)
        drawn[:] += [len(split_rows) for split_rows in rows.values()]
        return rows["train"], np.sort(np.concatenate([rows["val"], rows["test"]]))

    path = job.work.path / "counts" / part_name(part.log, part.number)
    counts = count_part(job.blocks(part), job.schema, path, rows_of=rows_of, last=part.last, counted=job.counted)
    if job.splitting.by_row:
        counts.split_rows = tuple(drawn.tolist())
    return counts


class _Rejects:
    """Stops the pass at more malformed lines than allowed, once the parts before them are counted, which number the lines."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._count, self._first = 0, ""
        self._checked = [0] * len(job.logs)  # parts checked in each log
        self._lines = [0] * len(job.logs)

    def check(self, log: int, records: Mapping[int, PartRecord]) -> None:
        limit = self._job.options.max_bad_rows
        while record := records.get(self._checked[log]):
            if record.reasons and not self._first:
                self._first = self._describe(log, *record.reasons[0])
            self._count += record.rejected
            if self._count > limit:
                first = f"{self._first}; it is the first of more than {limit} malformed lines" if limit else self._first
                raise UserError(f"{first}; fix the log, or raise `max_bad_rows` to drop malformed lines")
            self._checked[log] += 1
            self._lines[log] += record.lines

    def _describe(self, log: int, line: int, reason: str) -> str:
        source, schema = self._job.options.inputs[log], self._job.schema
        number = self._job.first_line(log) + self._lines[log] + line
        may_be_header = number == 1 and not schema.header and schema.format != "jsonl"
        may_be_header &= not schema.of_kind("hex")  # Criteo's logs have no header
        may_be_header &= parquet_names(source) is None
        hint = "; if it holds column names, set header = true in the schema" if may_be_header else ""
        return f"{source}:{number}: {reason}{hint}"


def describe_inputs(job: Job, parts: Sequence[CountedPart]) -> tuple[tuple[InputFile, ...], tuple[RejectedLine, ...]]:
    """Return the logs as read, and their first malformed lines."""
    inputs: list[InputFile] = []
    rejected: list[RejectedLine] = []
    for log, identity in enumerate(job.logs):
        line, records = job.first_line(log), [part.counts for part in parts if part.log == log]
        for record in records:
            rejected += [RejectedLine(file=identity.name, line=line + at, reason=reason) for at, reason in record.reasons]
            line += record.lines
        lines, malformed = sum(record.lines for record in records), sum(record.rejected for record in records)
        inputs.append(InputFile(name=identity.name, bytes=identity.bytes, rows_in=lines, rows_rejected=malformed))
    return tuple(inputs), tuple(rejected[:_REJECTED_LINES_KEPT])


def split_bounds(job: Job, parts: Sequence[CountedPart]) -> tuple[int, int]:
    """Return the numbers of the first validation and test rows, if splits go by position."""
    return job.splitting.bounds([sum(part.counts.rows for part in parts if part.log == log) for log in range(len(job.logs))])


def train_and_rest(job: Job, parts: Sequence[CountedPart], train_rows: int) -> list[GroupCounts]:
    """Group all parts' counts. If splits go by position, a part with training and other rows is counted again as two groups."""
    groups = []
    for part in parts:
        counts, trains = part.counts, True
        if not job.splitting.by_row and part.end_row > train_rows:
            trains = part.first_row < train_rows
            if trains:
                counts = _count_apart(job, part, train_rows - part.first_row)
        both = replace(counts.train, trains=trains), replace(counts.rest, trains=False)
        groups += [group for group in both if group.rows]
    return groups


def _count_apart(job: Job, part: CountedPart, train_rows: int) -> PartCounts:
    name = f"{part_name(part.log, part.number)}-apart"
    counts = job.work.load(f"counts/{name}", PartCounts)
    if counts is None:
        reread = next(job.reader(part.log, part.number.__ne__)())
        counts = count_part(
            job.blocks(reread),
            job.schema,
            job.work.path / "counts" / name,
            rows_of=lambda parsed, first: (slice(0, max(train_rows - first, 0)), slice(max(train_rows - first, 0), None)),
            last=part.counts.last,
            counted=job.counted,
        )
        job.work.save(f"counts/{name}", counts)
    return counts


@dataclass(kw_only=True)
class PartTimes(PartRecord):
    """A part's times, ascending, each representing equally many rows.

    At most 1,024 quantiles of a part are kept, so memory is bounded and fractions are accurate to a thousandth.
    """

    times: tuple[float, ...]


def find_times(job: Job, schedule: Schedule) -> Splitting:
    """Find the times at which validation and test begin, before pass 1, if rows are split by time in given fractions.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records = pass_over(job, schedule, _record_times, PartTimes, folder="times", description="reading times")
    parts = [part for log_records in records for part in log_records.values() if part.rows]
    val, test = job.splitting.val_fraction, job.splitting.test_fraction
    return replace(job.splitting, val_from=_time_after(parts, 1 - val - test), test_from=_time_after(parts, 1 - test))


def _record_times(job: Job, part: Part) -> PartTimes:
    record, blocks = PartRecord(last=part.last), [np.empty(0)]
    for parsed in job.blocks(part):
        assert parsed.times is not None, "`Splitting.schema_used` has been called"
        blocks.append(parsed.times)
        record.add(parsed)
    times = np.sort(np.concatenate(blocks))
    if len(times) > _QUANTILES:
        times = times[((np.arange(_QUANTILES) + 0.5) / _QUANTILES * len(times)).astype(np.int64)]
    return PartTimes(**vars(record), times=tuple(times.tolist()))


def _time_after(parts: Sequence[PartTimes], share: float) -> float:
    """Return the least time with at least this share of the rows before it; if none has, the next number after all times."""
    times = np.concatenate([[0.0][: not parts], *(part.times for part in parts)])
    weights = np.concatenate([[1.0][: not parts], *(np.full(len(part.times), part.rows / len(part.times)) for part in parts)])
    order = np.argsort(times, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    first = int(np.searchsorted(before, share * weights.sum() - 1e-6))
    return float(times[order][first] if first < len(times) else np.nextafter(times.max(), np.inf))
