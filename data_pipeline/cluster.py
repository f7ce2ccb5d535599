"""The passes on a Dask cluster: the same functions of a part as on threads, called by workers that see the same files.

Workers need this package, the logs under their paths or URLs, and the output's folder, as on a shared file system. They exchange
nothing: a part's results are files in the work folder, and a few numbers for the client. So a worker that dies costs the part it
was at, which another one does again, and a run begun on threads is resumed here, or the other way round, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.job import Job
from data_pipeline.pool import Result, Schedule, Work, call, tasks_of_parts
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
    futures = client.map(call, list(tasks_of_parts(there, work, done, details)), pure=False)
    try:
        for _, results in distributed.as_completed(futures, loop=client.loop, with_results=True):
            yield from results
    except distributed.KilledWorker as error:
        raise ValueError(
            "--scheduler: several workers died on the same part, as they do out of memory; lower --part-size or give them more, "
            "and run the same command again, which resumes"
        ) from error
    finally:
        client.cancel(futures)


def _absolute(log: Source) -> Source:
    return log.absolute() if isinstance(log, Path) else log
