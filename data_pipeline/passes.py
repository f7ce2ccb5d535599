"""A pass over all logs: works on every part once, keeps its record for a run that resumes, and limits malformed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from data_pipeline.errors import UserError
from data_pipeline.job import Job, part_name
from data_pipeline.parse import REASONS_KEPT, Parsed
from data_pipeline.parts import Part, parquet_names
from data_pipeline.pool import Schedule

Key = tuple[int, int]  # the numbers of a log and of a part in it


@dataclass(kw_only=True)
class PartRecord:
    """What a pass counts in a part, block by block: lines, well-formed rows, rejected lines, and why the first were rejected.

    reasons: as (line of the part from 0, reason).
    last: the log ends with this part.
    """

    last: bool
    lines: int = 0
    rows: int = 0
    rejected: int = 0
    reasons: tuple[tuple[int, str], ...] = ()

    def add(self, parsed: Parsed) -> None:
        """Count a block."""
        self.lines += parsed.lines
        self.rows += parsed.rows
        self.rejected += parsed.rejected
        self.reasons += parsed.reasons[: REASONS_KEPT - len(self.reasons)]

    def is_intact(self, data: Path) -> bool:
        """Whether the part's files are still in the folder of the unfinished data set."""
        return True


Record = TypeVar("Record", bound=PartRecord)


def pass_over(
    job: Job,
    schedule: Schedule,
    work: Callable[[Job, Part, Any], Record],
    kind: type[Record],
    *,
    folder: str,
    description: str,
    details: Mapping[Key, Any] | None = None,
    total: int | None = None,
) -> dict[Key, Record]:
    """Run a pass over every part that is not done yet, and return all records in the order of the parts.

    Args:
        work: makes a part's record, which is of type `kind` and is saved in `folder` of the work folder, from the job, the part and
            its entry in `details` or None.
        description, total: for the progress bar; the rows of all parts, if known.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records: dict[Key, Record] = {}
    for path in (job.work.path / folder).glob("?????-??????.json"):
        if record := _load(job, f"{folder}/{path.stem}", kind):
            records[int(path.stem[:5]), int(path.stem[6:])] = record
    done: dict[int, set[int]] = {log: set() for log in range(len(job.logs))}
    for log, number in records:
        done[log].add(number)
    for (log, number), record in records.items():
        if record.last and len(done[log]) == number + 1:
            del done[log]
    rejected = sum(record.rejected for record in records.values())
    rows = sum(record.rows for record in records.values())
    with (
        tqdm(desc=description, total=total, unit="row", unit_scale=True, disable=None, initial=rows) as bar,
        closing(schedule(job, partial(_recorded, work, kind, folder), done, details or {})) as results,
    ):
        _limit_rejected(job, records, rejected)
        for key, record in results:
            bar.update(record.rows)
            records[key] = record
            rejected += record.rejected
            _limit_rejected(job, records, rejected)
    return dict(sorted(records.items()))


def _recorded(
    work: Callable[[Job, Part, Any], Record], kind: type[Record], folder: str, job: Job, part: Part, detail: Any
) -> tuple[Key, Record]:
    name = f"{folder}/{part_name(part.log, part.number)}"
    record = _load(job, name, kind)
    if record is None:  # otherwise a worker saved it and died before it could report it
        record = work(job, part, detail)
        job.work.save(name, record)
    return (part.log, part.number), record


def _load(job: Job, name: str, kind: type[Record]) -> Record | None:
    record = job.work.load(name, kind)
    return record if record and record.is_intact(job.work.data) else None


def rejected_lines(job: Job, log: int, records: Iterable[PartRecord]) -> list[tuple[int, str]]:
    """Return the first malformed lines of a log's consecutive first parts, as (line from 1, reason)."""
    line, rejected = job.first_line(log), []
    for record in records:
        rejected += [(line + at, reason) for at, reason in record.reasons]
        line += record.lines
    return rejected


def _limit_rejected(job: Job, records: Mapping[Key, PartRecord], rejected: int) -> None:
    """Stop the pass at more malformed lines than allowed, once the parts before them are done, which number the lines."""
    limit, first = job.options.max_bad_rows, ""
    if rejected <= limit:
        return
    numbered = 0
    for log in range(len(job.logs)):
        known: list[PartRecord] = []
        while record := records.get((log, len(known))):
            known.append(record)
        if not first and (lines := rejected_lines(job, log, known)):
            first = _describe(job, log, *lines[0])
        numbered += sum(record.rejected for record in known)
    if numbered > limit:
        first += f"; it is the first of more than {limit} malformed lines" if limit else ""
        raise UserError(f"{first}; fix the log, or raise `max_bad_rows` to drop malformed lines")


def _describe(job: Job, log: int, line: int, reason: str) -> str:
    source, schema = job.options.inputs[log], job.schema
    may_be_header = line == 1 and not schema.header and schema.format != "jsonl"
    may_be_header &= not schema.of_kind("hex")  # Criteo's logs have no header
    hint = "; if it holds column names, set header = true in the schema" if may_be_header and parquet_names(source) is None else ""
    return f"{source}:{line}: {reason}{hint}"
