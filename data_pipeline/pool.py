"""Runs over logs, and schedules of their passes: on threads of this process, or an executor's processes, such as a Dask cluster's.

Threads suffice because all slow work runs outside Python's lock: decompressing, parsing, sorting, encoding, compressing. An
executor's processes need this package, the logs at the same paths or URLs, and the output's folder. They don't exchange data: a
part's results are files in the work folder and a few numbers. If a worker of a cluster dies, another one repeats its part. A run
begun on threads can be resumed on a cluster, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from data_pipeline import native
from data_pipeline.errors import UserError, naming_extras
from data_pipeline.job import Job
from data_pipeline.manifest import FILES, SPLITS, versions
from data_pipeline.options import PassOptions
from data_pipeline.parts import Part, Skip, check_layout, count_parts, inputs_changed
from data_pipeline.schema import LogSchema
from data_pipeline.sources import identify_log
from data_pipeline.splits import Splitting
from data_pipeline.work import Tell, work_folder

Result = TypeVar("Result")
Work = Callable[[Job, Part, Any], Result]
_WAIT_SECONDS = 30


class Schedule(Protocol):
    """A function that runs a pass: `on_threads`, or `on_executor` of an executor."""

    def __call__(
        self, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
    ) -> Generator[Result]:
        """Yield the result of `work` for every part that is not done, in the order of completion.

        Args:
            work: takes the job, a part and its entry in `details` or None; it may be called more than once for a part.
            done: for each log that has parts left to process, the numbers of the parts to skip.
            details: by (log, part number).
        """


_RECORDS = 2
"""Version of the files that passes record in a work folder; a run that has others starts over."""


def on_threads(
    job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """Run a pass on as many threads as cores and memory allow; a `Schedule`.

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


def on_executor(
    executor: Executor, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """Run a pass on an executor, in a task for each part; a `Schedule` after its first argument."""
    inputs = tuple(log.absolute() if isinstance(log, Path) else log for log in job.options.inputs)
    remote_job = replace(job, options=replace(job.options, inputs=inputs))
    futures = [executor.submit(task) for task in _tasks(remote_job, work, done, details)]
    try:
        for future in as_completed(futures):
            yield from future.result()
    finally:
        for future in futures:
            future.cancel()


def _tasks(
    job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Iterator[Callable[[], list[Result]]]:
    """Yield a task for each part, or one for a whole compressed log, which can only be read from its beginning."""
    for log, leave_out in done.items():
        count = count_parts(job.options.inputs[log], job.options.part_bytes)
        if count is None:
            log_details = {number: detail for (other, number), detail in details.items() if other == log}
            yield partial(_work_on, job, work, log, frozenset(leave_out).__contains__, log_details)
            continue
        for number in set(range(count)).difference(leave_out):
            yield partial(_work_on, job, work, log, number.__ne__, {number: details.get((log, number))})


def _work_on(job: Job, work: Work[Result], log: int, skip: Skip, details: Mapping[int, Any]) -> list[Result]:
    native.return_freed_arrays()
    return [work(job, part, details.get(part.number)) for part in job.parts(log, skip)]


@contextmanager
def dask_schedule(address: str, *, workers: int) -> Iterator[Schedule]:
    """Yield a `Schedule` on the Dask cluster at `address`, or on `workers` local processes if it is "local".

    Raises:
        ValueError: Dask is not installed, no scheduler with a worker answers, or workers die again and again.
    """
    with naming_extras():
        import distributed
    with ExitStack() as stack:
        scheduler_address = address
        if address == "local":
            processes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": None, "dashboard_address": ":0"}
            scheduler_address = stack.enter_context(distributed.LocalCluster(**processes, silence_logs="ERROR")).scheduler_address
        try:
            client = stack.enter_context(distributed.Client(scheduler_address, set_as_default=False, timeout=_WAIT_SECONDS))
            client.wait_for_workers(1, timeout=_WAIT_SECONDS)
        except (OSError, ValueError) as error:
            raise UserError(
                f"`scheduler` {address}: no scheduler with a worker answers ({' '.join(str(error).split())}); "
                "start them with `dask scheduler` and `dask worker`, or use `scheduler` local"
            ) from error
        try:
            yield partial(on_executor, client.get_executor(pure=False))
        except distributed.KilledWorker as error:
            raise UserError(
                "`scheduler`: several workers died on the same part, probably out of memory; lower `part_bytes` or give workers "
                "more memory, and run the same command again to resume"
            ) from error


@contextmanager
def open_job(
    options: PassOptions,
    schema: LogSchema,
    splitting: Splitting,
    *,
    counted: Iterable[int] = (),
    identity: dict[str, Any],
    files: tuple[str, ...] | None = FILES,
    on: Schedule = on_threads,
    tell: Tell,
) -> Iterator[tuple[Job, Schedule]]:
    """Yield a run over logs, and what schedules its passes; its output is put in place when the block ends.

    Args:
        counted: numbers of the categorical columns whose values pass 1 counts.
        identity: what determines the results besides logs, columns and versions, as JSON values.
        files: as for `data_pipeline.work.work_folder`.
        on: the schedule if options name no scheduler.
    """
    logs = tuple(map(identify_log, options.inputs))
    layouts = tuple(check_layout(log, schema) for log in options.inputs)
    schema = splitting.schema_used(schema)
    read = {"inputs": [asdict(log) for log in logs], "columns": asdict(schema), "versions": versions(), "records": _RECORDS}
    scheduled = dask_schedule(options.scheduler, workers=options.threads) if options.scheduler else nullcontext(on)
    with (
        scheduled as schedule,
        work_folder(options.output, identity=read | identity, files=files, overwrite=options.overwrite, tell=tell) as work,
    ):
        for folder in (*SPLITS, "vocabulary") if files else ():
            (work.data / folder).mkdir(exist_ok=True)
        job = Job(
            options=options, schema=schema, logs=logs, work=work, splitting=splitting, layouts=layouts, counted=frozenset(counted)
        )
        yield job, schedule
        work.remove_unfinished()
        if tuple(map(identify_log, options.inputs)) != logs:
            raise inputs_changed()
