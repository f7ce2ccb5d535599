"""Schedules, which run the passes over logs: threads of this process, or another `Schedule`.

Threads suffice because all slow work runs outside Python's lock: decompressing, parsing, sorting, encoding, compressing. Some
threads read parts, others process them, and the number of parts in memory is limited.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, Protocol, TypeVar

from data_pipeline import native
from data_pipeline.job import Job
from data_pipeline.parts import Part, Skip, count_parts

Result = TypeVar("Result")
Work = Callable[[Job, Part, Any], Result]
PARTS_PER_WORKER = 2


class Schedule(Protocol):
    """A function that runs a pass: `on_threads`, or one for a Dask cluster (`data_pipeline.cluster`)."""

    def __call__(
        self, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
    ) -> Generator[Result]:
        """Yield the result of `work` for every part that is not done, in the order of completion.

        Args:
            work: takes the job, a part and its entry in `details` or None; it may be called more than once for a part.
            done: for each log that has parts left to process, the numbers of the parts to skip.
            details: by (log, part number).
        """


def on_threads(
    job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """Run a pass on as many threads as cores and memory allow; a `Schedule`."""
    native.return_freed_arrays()
    readers = [job.reader(log, leave_out.__contains__) for log, leave_out in done.items()]
    return work_on_parts(readers, lambda part: work(job, part, details.get((part.log, part.number))), workers=job.options.threads)


def work_on_parts(
    logs: Sequence[Callable[[], Iterator[Part]]], work: Callable[[Part], Result], *, workers: int
) -> Generator[Result]:
    """Yield the result of `work` for every part of every log, in the order of completion.

    One part is read ahead for each worker. Closing the generator, or an error while reading or working, stops the rest.
    """
    finished: queue.Queue[Future[Any]] = queue.Queue()  # reads of logs, which return the number of parts, and work on parts
    room, stop = threading.Semaphore(PARTS_PER_WORKER * workers), threading.Event()

    def work_on(part: Part) -> Result | None:
        try:
            if stop.is_set():
                return None
            result = work(part)
            part.release()
            return result
        finally:
            room.release()

    def read(log: Callable[[], Iterator[Part]]) -> int:
        parts, count = log(), 0
        while True:
            room.acquire()
            try:
                part = None if stop.is_set() else next(parts, None)
            except BaseException:
                room.release()
                raise
            if part is None:
                room.release()
                return count
            pool.submit(work_on, part).add_done_callback(finished.put)
            del part  # only the worker refers to it from here on
            count += 1

    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(workers) as readers:
        reads = {readers.submit(read, log) for log in logs}
        for log_read in reads:
            log_read.add_done_callback(finished.put)
        try:
            expected = yielded = 0
            while reads or yielded < expected:
                future = finished.get()
                if future in reads:
                    reads.remove(future)
                    expected += future.result()
                else:
                    yielded += 1
                    yield future.result()
        finally:
            stop.set()


def on_executor(
    executor: Executor, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """Run a pass on an executor's processes, for work that holds Python's lock; a `Schedule` after its first argument."""
    futures = [executor.submit(call, task) for task in tasks_of_parts(job, work, done, details)]
    try:
        for future in as_completed(futures):
            yield from future.result()
    finally:
        for future in futures:
            future.cancel()


def tasks_of_parts(
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


def call(task: Callable[[], list[Result]]) -> list[Result]:
    """Run a task of `tasks_of_parts`."""
    return task()


def _work_on(job: Job, work: Work[Result], log: int, skip: Skip, details: Mapping[int, Any]) -> list[Result]:
    native.return_freed_arrays()
    return [work(job, part, details.get(part.number)) for part in job.reader(log, skip)()]
