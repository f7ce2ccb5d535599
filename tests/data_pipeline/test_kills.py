"""A run that is killed at random moments ends like an unbroken one, for every kind of log, on threads and on Dask.

KILLS=100 pytest tests/data_pipeline/test_kills.py        # kills per kind; takes a quarter of an hour
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_logs import files_of, random_rows, to_text

from data_pipeline import atomic
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import criteo_schema

ROWS = random_rows(700)
KILLS = int(os.environ.get("KILLS", "0"))
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(params=["text", "gz", "parquet", pytest.param("dask", marks=pytest.mark.distributed)])
def options(request: pytest.FixtureRequest, tmp_path: Path, write_log: Callable[..., Path]) -> PreprocessOptions:
    """Three logs of several parts each, split by position, or gzipped and split at random."""
    if request.param == "dask":
        pytest.importorskip("distributed", reason="Dask is not installed")
    suffix = ".gz" if request.param == "gz" else ""
    logs = [write_log(to_text(ROWS[i::3]) + b"bad\n" * (i == 1), f"day_{i}{suffix}") for i in range(3)]
    if request.param == "parquet":
        names = [column.name for column in criteo_schema(labeled=True).columns]
        for number, log in enumerate(logs):
            columns = [[cell or None for cell in column] for column in zip(*ROWS[number::3], strict=True)]
            pq.write_table(pa.table(dict(zip(names, columns, strict=True))), log, row_group_size=60)
    return PreprocessOptions(
        inputs=tuple(logs),
        output=tmp_path / "data",
        part_bytes=9000,
        max_bad_rows=1,
        split="random" if suffix else "chronological",
        workers=2,
        scheduler="local" if request.param == "dask" else None,
        order="similarity",
    )


def run(options: PreprocessOptions) -> None:
    os.setsid()
    preprocess(options)


def kill_after(options: PreprocessOptions, seconds: float) -> None:
    """Start a run, and kill its process and all child processes after some seconds."""
    process = PROCESSES.Process(target=run, args=(options,))
    process.start()
    process.join(seconds)
    if process.is_alive():
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:  # the process has no group yet
            process.kill()
    process.join()


def test_killed(options: PreprocessOptions) -> None:
    unbroken = options.output.with_name("unbroken")
    preprocess(replace(options, output=unbroken, scheduler=None))
    expected = files_of(unbroken)
    draw = random.Random(KILLS)
    whole, killed = 600.0, 0  # seconds of the fastest run so far, so that kills hit runs also where the first one was slow
    while killed < (KILLS or (1 if options.scheduler else 3)):
        if (options.output / "manifest.json").exists():
            assert files_of(options.output) == expected
            atomic.remove(options.output)
        start = time.perf_counter()
        kill_after(options, draw.uniform(0, whole) if whole < 600 else whole)
        if (options.output / "manifest.json").exists():
            whole = min(whole, time.perf_counter() - start)
        else:
            killed += 1
    if not options.output.exists():
        preprocess(options)
    assert files_of(options.output) == expected
    assert not any(path.name.startswith(".") for path in options.output.parent.iterdir())
