"""The passes on a Dask cluster: the same functions of a part as on threads, called by workers that see the same files.

Workers need this package, the logs under their paths or URLs, and the output's folder, as on a shared file system. They exchange
nothing: a part's results are files in the work folder, and a few numbers for the client. So a worker that dies costs the part it
was at, which another one does again, and a run begun on threads goes on here, or the other way round, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.job import Job
from data_pipeline.parts import Skip, count_parts, read_parts
from data_pipeline.pool import Result, Schedule, Work
from data_pipeline.sources import Source

_WAIT_SECONDS = 30


@contextmanager
def dask_schedule(address: str, *, workers: int) -> Iterator[Schedule]:
    """Give what runs passes on the cluster at `address`, or on one of `workers` local processes for "local".

    Raises:
        ValueError: Dask is not installed, or there is no scheduler or no worker.
    """
    try:
        import distributed
    except ImportError as error:
        raise ValueError(f"--scheduler {address} needs Dask; install it with pip install 'comera-rec[dask]'") from error
    with ExitStack() as stack:
        where = address
        if address == "local":
            processes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": None, "dashboard_address": ":0"}
            where = stack.enter_context(distributed.LocalCluster(**processes, silence_logs="ERROR")).scheduler_address
        try:
            client = stack.enter_context(distributed.Client(where, set_as_default=False, timeout=_WAIT_SECONDS))
            client.wait_for_workers(1, timeout=_WAIT_SECONDS)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--scheduler {address}: no scheduler with a worker answers ({' '.join(str(error).split())}); "
                "start them with `dask scheduler` and `dask worker`, or give local"
            ) from error
        yield partial(_run, client, distributed)


def _run(
    client: Any,
    distributed: Any,
    job: Job,
    work: Work[Result],
    done: Mapping[int, Collection[int]],
    details: Mapping[tuple[int, int], Any],
) -> Generator[Result]:
    """A `Schedule`, for a client and its module."""
    there = replace(job, options=replace(job.options, inputs=tuple(_absolute(log) for log in job.options.inputs)))
    futures = client.map(_call, list(_tasks(there, work, done, details)), pure=False)
    try:
        for _, results in distributed.as_completed(futures, loop=client.loop, with_results=True):
            yield from results
    except distributed.KilledWorker as error:
        raise ValueError(
            "--scheduler: several workers died on the same part, as they do out of memory; lower --part-size or give them more, "
            "and run the same command again, which goes on"
        ) from error
    finally:
        client.cancel(futures)


def _tasks(
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


def _call(task: Callable[[], list[Result]]) -> list[Result]:
    return task()


def _work_on(job: Job, work: Work[Result], log: int, skip: Skip, details: Mapping[int, Any]) -> list[Result]:
    parts = read_parts(log, job.options.inputs[log], part_bytes=job.options.part_bytes, skip=skip)
    return [work(job, part, details.get(part.number)) for part in parts]


def _absolute(log: Source) -> Source:
    return log.absolute() if isinstance(log, Path) else log
