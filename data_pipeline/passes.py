"""A pass over all logs: works on every part once, keeps its record for a run that resumes, and limits malformed lines.

Threads suffice because all slow work runs outside Python's lock: decompressing, parsing, sorting, encoding, compressing.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from data_pipeline import native
from data_pipeline.errors import UserError
from data_pipeline.job import Job
from data_pipeline.parse import Parsed
from data_pipeline.parts import Part, Skip, count_parts, parquet_names

Key = tuple[int, int]  # the numbers of a log and of a part in it
Done = Mapping[int, Collection[int]]  # for each log that has parts left to process, the numbers of the parts to skip
Result = TypeVar("Result")
Work = Callable[[Job, Part, Any], Result]


@dataclass(kw_only=True)
class PartRecord:
    """What a pass counts in a part: lines, well-formed rows, rejected lines, and why the first were rejected.

    reasons: as (line of the part from 0, reason).
    log, number, last: those of the part.
    """

    log: int
    number: int
    last: bool
    lines: int
    rows: int
    rejected: int = 0
    reasons: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, part: Part, parsed: Parsed) -> "PartRecord":
        """Return the record of a parsed part."""
        counts = {name: getattr(parsed, name) for name in ("lines", "rows", "rejected", "reasons")}
        return PartRecord(log=part.log, number=part.number, last=part.last, **counts)

    @property
    def key(self) -> Key:
        return self.log, self.number


Record = TypeVar("Record", bound=PartRecord)


def part_name(part: Part | PartRecord) -> str:
    """Return the name of a part's files in the work folder."""
    return f"{part.log:05d}-{part.number:06d}"


def by_log(records: Iterable[Record]) -> Mapping[int, list[Record]]:
    """Group parts by their log; one without rows may have none."""
    grouped = defaultdict[int, list[Record]](list)
    for record in records:
        grouped[record.log].append(record)
    return grouped


def pass_over(
    job: Job,
    work: Work[Record],
    kind: type[Record],
    *,
    folder: str,
    description: str,
    details: Mapping[Key, Any] | None = None,
    total: int | None = None,
) -> list[Record]:
    """Run a pass over every part that is not done yet, and return all records in the order of the parts.

    Args:
        work: makes a part's record, which is of type `kind` and is saved in `folder` of the work folder, from the job, the part and
            its entry in `details` or None.
        description, total: for the progress bar; the rows of all parts, if known.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    names = (f"{folder}/{path.stem}" for path in (job.work.path / folder).glob("?????-??????.json"))
    records = {record.key: record for name in names if (record := job.work.load(name, kind))}
    done: dict[int, set[int]] = {log: set() for log in range(len(job.logs))}
    for log, number in records:
        done[log].add(number)
    for record in records.values():
        if record.last and len(done[record.log]) == record.number + 1:
            del done[record.log]
    rows = sum(record.rows for record in records.values())
    with (
        tqdm(desc=description, total=total, unit="row", unit_scale=True, disable=None, initial=rows) as bar,
        closing(work_on_parts(job, partial(_recorded, work, kind, folder), done, details or {})) as results,
    ):
        rejected = sum(record.rejected for record in records.values())
        _limit_rejected(job, records, rejected)
        for record in results:
            bar.update(record.rows)
            records[record.key] = record
            rejected += record.rejected
            _limit_rejected(job, records, rejected)
    return [record for _, record in sorted(records.items())]


def _recorded(work: Work[Record], kind: type[Record], folder: str, job: Job, part: Part, detail: Any) -> Record:
    name = f"{folder}/{part_name(part)}"
    return job.work.once(name, kind, lambda: work(job, part, detail))  # a worker may have saved it and died before it reported it


def rejected_lines(job: Job, log: int, records: Iterable[PartRecord]) -> list[tuple[int, str]]:
    """Return the first malformed lines of a log's consecutive first parts, as (line from 1, reason)."""
    line, rejected = job.first_line(log), []
    for record in records:
        rejected += [(line + at, reason) for at, reason in record.reasons]
        line += record.lines
    return rejected


def _limit_rejected(job: Job, records: Mapping[Key, PartRecord], rejected: int) -> None:
    """Stop the pass at more malformed lines than allowed, once the parts before them are done, which number the lines."""
    limit, first, numbered = job.options.max_bad_rows, "", 0
    if rejected <= limit:
        return
    for log in range(len(job.logs)):
        known = [records[key] for key in takewhile(records.__contains__, ((log, number) for number in count()))]
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


def work_on_parts(job: Job, work: Work[Result], done: Done, details: Mapping[Key, Any]) -> Generator[Result]:
    """Yield the result of `work` for every part that is not done, in the order of completion.

    Args:
        work: takes the job, a part and its entry in `details` or None; it may be called more than once for a part.
    """
    return (_on_executor if job.executor else _on_threads)(job, work, done, details)


def _on_threads(job: Job, work: Work[Result], done: Done, details: Mapping[Key, Any]) -> Generator[Result]:
    """Work on as many threads as cores and memory allow.

    Each log is read by one thread at a time, which then leaves it to another one. Reading waits for the parts read before, so there
    are at most as many parts in memory as threads, and one for each log being read.
    """
    native.return_freed_arrays()
    logs = (job.parts(log, leave_out.__contains__) for log, leave_out in done.items())
    tasks: dict[Future[Any], Iterator[Part] | None] = {}  # the log of a read; None of work on a part

    def work_on(part: Part) -> Result:
        return work(job, part, details.get((part.log, part.number)))

    def read(parts: Iterator[Part]) -> None:
        tasks[pool.submit(next, parts, None)] = parts

    with ThreadPoolExecutor(job.options.threads) as pool:
        try:
            for parts in islice(logs, job.options.threads):
                read(parts)
            while tasks:
                finished = wait(tasks, return_when=FIRST_COMPLETED).done
                while finished:
                    future = finished.pop()
                    log = tasks.pop(future)
                    result = future.result()
                    if log is None:
                        yield result
                    elif result is not None:
                        tasks[pool.submit(work_on, result)] = None
                        read(log)
                    elif another := next(logs, None):
                        read(another)
                    del future, result  # only the worker refers to a part
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_executor(job: Job, work: Work[Result], done: Done, details: Mapping[Key, Any]) -> Generator[Result]:
    """Work on the job's executor, in a task for each part, or one for a compressed log, which is read from its beginning."""
    assert job.executor, "the caller has checked this"
    inputs = tuple(log.absolute() if isinstance(log, Path) else log for log in job.options.inputs)
    remote = partial(_work_on, replace(job, executor=None, options=replace(job.options, inputs=inputs)), work)
    futures, of_logs = [], defaultdict[int, dict[Key, Any]](dict)
    for key, detail in details.items():
        of_logs[key[0]][key] = detail
    for log, leave_out in done.items():
        parts = count_parts(inputs[log], job.options.part_bytes)
        if parts is None:
            futures.append(job.executor.submit(remote, log, frozenset(leave_out).__contains__, of_logs[log]))
            continue
        for number in set(range(parts)).difference(leave_out):
            futures.append(job.executor.submit(remote, log, number.__ne__, {(log, number): details.get((log, number))}))
    try:
        for future in as_completed(futures):
            yield from future.result()
    finally:
        for future in futures:
            future.cancel()


def _work_on(job: Job, work: Work[Result], log: int, skip: Skip, details: Mapping[Key, Any]) -> list[Result]:
    native.return_freed_arrays()
    return [work(job, part, details.get((part.log, part.number))) for part in job.parts(log, skip)]
