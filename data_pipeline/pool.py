"""How the passes over logs are run: by threads of this process, or whatever else is a `Schedule`.

Threads do, because all that takes time runs outside Python's lock: decompressing, parsing, sorting, encoding, compressing. Some
read parts, others work on them, and no more parts are held than there is room for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from data_pipeline.job import Job
from data_pipeline.parts import Part

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
    readers = [job.reader(log, leave_out.__contains__) for log, leave_out in done.items()]
    return work_on_parts(readers, lambda part: work(job, part, details.get((part.log, part.number))), workers=job.options.threads)


def work_on_parts(
    logs: Sequence[Callable[[], Iterator[Part]]], work: Callable[[Part], Result], *, workers: int
) -> Generator[Result]:
    """What `work` gives for every part of every log, as it comes.

    A worker holds its part, and one more is read ahead for it. Leaving the loop, or an error in reading or working, stops the rest.
    """
    done: queue.Queue[tuple[str, Result] | tuple[str, int] | tuple[str, BaseException]] = queue.Queue()
    room, stop = threading.Semaphore(PARTS_HELD_PER_WORKER * workers), threading.Event()

    def work_on(part: Part) -> None:
        try:
            if not stop.is_set():
                done.put(("result", work(part)))
        except BaseException as error:
            done.put(("error", error))
        finally:
            room.release()

    def read(log: Callable[[], Iterator[Part]]) -> None:
        parts, count = log(), 0
        while not stop.is_set():
            room.acquire()
            try:
                part = next(parts, None)
            except BaseException as error:
                done.put(("error", error))
                part = None
            if part is None:
                room.release()
                break
            pool.submit(work_on, part)
            del part  # the worker's alone from here on
            count += 1
        done.put(("parts read", count))

    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(workers) as readers:
        for log in logs:
            readers.submit(read, log)
        try:
            reading, expected, given = len(logs), 0, 0
            while reading or given < expected:
                match done.get():
                    case ("parts read", int(count)):
                        reading, expected = reading - 1, expected + count
                    case ("error", BaseException() as error):
                        raise error
                    case (_, result):
                        given += 1
                        yield result  # type: ignore[misc]
        finally:
            stop.set()
