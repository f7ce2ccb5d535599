"""How the passes over logs are run: by threads of this process, or whatever else is a `Schedule`.

Threads do, because all that takes time runs outside Python's lock: decompressing, parsing, sorting, encoding, compressing. Some
read parts, others work on them, and no more parts are held than there is room for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from data_pipeline import native
from data_pipeline.job import Job
from data_pipeline.parts import Part, Skip, count_parts

Result = TypeVar("Result")
Work = Callable[[Job, Part, Any], Result]
PARTS_HELD_PER_WORKER = 2


class Schedule(Protocol):
    """What runs a pass: `on_threads`, or a Dask cluster (`data_pipeline.cluster`)."""

    def __call__(
        self, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
    ) -> Generator[Result]:
        """What `work` gives for every part that is left to do, as it comes.

        Args:
            job: the run.
            work: takes the job, a part and its entry in `details` or None; it may be called again for a part.
            done: for each log that has parts to work on, the numbers of those to leave out.
            details: by log and number of part.
        """


def on_threads(
    job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """A pass on as many threads as cores and memory allow; a `Schedule`."""
    native.return_freed_arrays()
    readers = [job.reader(log, leave_out.__contains__) for log, leave_out in done.items()]
    return work_on_parts(readers, lambda part: work(job, part, details.get((part.log, part.number))), workers=job.options.threads)


@dataclass(frozen=True)
class _Done(Generic[Result]):
    result: Result


@dataclass(frozen=True)
class _Read:
    """A log's reader is at its end."""

    parts: int


@dataclass(frozen=True)
class _Failed:
    error: BaseException


def work_on_parts(
    logs: Sequence[Callable[[], Iterator[Part]]], work: Callable[[Part], Result], *, workers: int
) -> Generator[Result]:
    """What `work` gives for every part of every log, as it comes.

    A worker holds its part, and one more is read ahead for it. Leaving the loop, or an error in reading or working, stops the rest.
    """
    done: queue.Queue[_Done[Result] | _Read | _Failed] = queue.Queue()
    room, stop = threading.Semaphore(PARTS_HELD_PER_WORKER * workers), threading.Event()

    def work_on(part: Part) -> None:
        try:
            if not stop.is_set():
                done.put(_Done(work(part)))
            part.release()
        except BaseException as error:
            done.put(_Failed(error))
        finally:
            room.release()

    def read(log: Callable[[], Iterator[Part]]) -> None:
        parts, count = log(), 0
        while not stop.is_set():
            room.acquire()
            try:
                part = next(parts, None)
            except BaseException as error:
                done.put(_Failed(error))
                part = None
            if part is None:
                room.release()
                break
            pool.submit(work_on, part)
            del part  # the worker's alone from here on
            count += 1
        done.put(_Read(count))

    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(workers) as readers:
        for log in logs:
            readers.submit(read, log)
        try:
            reading, expected, given = len(logs), 0, 0
            while reading or given < expected:
                match done.get():
                    case _Read(parts):
                        reading, expected = reading - 1, expected + parts
                    case _Failed(error):
                        raise error
                    case _Done(result):
                        given += 1
                        yield result
        finally:
            stop.set()


def on_executor(
    executor: Executor, job: Job, work: Work[Result], done: Mapping[int, Collection[int]], details: Mapping[tuple[int, int], Any]
) -> Generator[Result]:
    """A pass on processes, for work that holds Python's lock; a `Schedule` but for its first argument."""
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
    """One for each part, but one for a whole gzipped log, which is read from its beginning."""
    for log, leave_out in done.items():
        count = count_parts(job.options.inputs[log], job.options.part_bytes)
        if count is None:
            of_log = {number: detail for (other, number), detail in details.items() if other == log}
            yield partial(_work_on, job, work, log, frozenset(leave_out).__contains__, of_log)
            continue
        for number in set(range(count)).difference(leave_out):
            yield partial(_work_on, job, work, log, number.__ne__, {number: details.get((log, number))})


def call(task: Callable[[], list[Result]]) -> list[Result]:
    """The results of a task of `tasks_of_parts`."""
    return task()


def _work_on(job: Job, work: Work[Result], log: int, skip: Skip, details: Mapping[int, Any]) -> list[Result]:
    native.return_freed_arrays()
    return [work(job, part, details.get(part.number)) for part in job.reader(log, skip)()]
