"""Passes on a Dask cluster: workers that share a file system call the same functions on parts as threads do.

Workers need this package, the logs at the same paths or URLs, and the output's folder. They don't exchange data: a part's results
are files in the work folder and a few numbers for the client. If a worker dies, another one repeats its part. A run begun on
threads can be resumed on a cluster, and vice versa, with identical output.
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
    """Yield a `Schedule` on the cluster at `address`, or on `workers` local processes if it is "local".

    Raises:
        ValueError: Dask is not installed, or no scheduler with a worker answers.
    """
    try:
        import distributed
    except ImportError as error:
        raise ValueError(f"--scheduler {address} needs Dask: run pip install distributed") from error
    with ExitStack() as stack:
        scheduler_address = address
        if address == "local":
            processes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": None, "dashboard_address": ":0"}
            scheduler_address = stack.enter_context(distributed.LocalCluster(**processes, silence_logs="ERROR")).scheduler_address
        try:
            client = stack.enter_context(distributed.Client(scheduler_address, set_as_default=False, timeout=_WAIT_SECONDS))
            client.wait_for_workers(1, timeout=_WAIT_SECONDS)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--scheduler {address}: no scheduler with a worker answers ({' '.join(str(error).split())}); "
                "start them with `dask scheduler` and `dask worker`, or use --scheduler local"
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
    """Run a pass on a client's cluster; a `Schedule` after its first two arguments."""
    remote_job = replace(job, options=replace(job.options, inputs=tuple(_absolute(log) for log in job.options.inputs)))
    futures = client.map(call, list(tasks_of_parts(remote_job, work, done, details)), pure=False)
    try:
        for _, results in distributed.as_completed(futures, loop=client.loop, with_results=True):
            yield from results
    except distributed.KilledWorker as error:
        raise ValueError(
            "--scheduler: several workers died on the same part, probably out of memory; lower --part-size or give workers more "
            "memory, and run the same command again to resume"
        ) from error
    finally:
        client.cancel(futures)


def _absolute(log: Source) -> Source:
    return log.absolute() if isinstance(log, Path) else log
