"""A run that was killed at random moments, or stopped on a full disk or at a bad line, resumes and ends like an unbroken one.

Passes on a Dask cluster write the same bytes as on threads, even if workers die.

KILLS=100 pytest tests/data_pipeline/test_resume.py -k killed        # kills per kind of log; takes a quarter of an hour
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_logs import files_of, random_rows, to_text
from refusals import refuse

from data_pipeline import atomic, count_pass, write_pass
from data_pipeline.job import Job
from data_pipeline.parts import Part
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import criteo_schema

ROWS = random_rows(700)
KILLS = int(os.environ.get("KILLS", "0"))
PROCESSES = multiprocessing.get_context("forkserver")
COUNT, WRITE = count_pass._count, write_pass._write


@pytest.fixture
def options(tmp_path: Path, write_log: Callable[..., Path]) -> PreprocessOptions:
    """Three logs of several parts each, with a malformed line, gzipped and split at random."""
    logs = tuple(write_log(to_text(ROWS[i::3]) + b"bad\n" * (i == 1), f"day_{i}.gz") for i in range(3))
    return PreprocessOptions(inputs=logs, output=tmp_path / "data", part_bytes=9000, max_bad_rows=1, split="random", workers=2)


@pytest.fixture(params=["text", "gz", "parquet", pytest.param("dask", marks=pytest.mark.distributed)])
def every_kind(request: pytest.FixtureRequest, options: PreprocessOptions, write_log: Callable[..., Path]) -> PreprocessOptions:
    """The same, or split by position in plain text or Parquet, with ids in an order of similarity."""
    options = replace(options, order="similarity")
    if request.param == "gz":
        return options
    if request.param == "dask":
        pytest.importorskip("distributed", reason="Dask is not installed")
    logs = [write_log(to_text(ROWS[i::3]) + b"bad\n" * (i == 1), f"day_{i}") for i in range(3)]
    if request.param == "parquet":
        names = [column.name for column in criteo_schema(labeled=True).columns]
        for number, log in enumerate(logs):
            columns = [[cell or None for cell in column] for column in zip(*ROWS[number::3], strict=True)]
            pq.write_table(pa.table(dict(zip(names, columns, strict=True))), log, row_group_size=60)
    scheduler = "local" if request.param == "dask" else None
    return replace(options, inputs=tuple(logs), split="chronological", scheduler=scheduler)


def run(options: PreprocessOptions) -> None:
    os.setsid()
    preprocess(options)


def kill_after(options: PreprocessOptions, seconds: float) -> None:
    """Start a run, and kill its process and all child processes some seconds after it has made its work folder."""
    process = PROCESSES.Process(target=run, args=(options,))
    process.start()
    while process.is_alive() and not atomic.hidden(options.output, "partial").exists():
        time.sleep(0.002)
    process.join(seconds)
    if process.is_alive():
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:  # the process has no group yet
            process.kill()
    process.join()


def test_killed(every_kind: PreprocessOptions) -> None:
    options, draw, killed = every_kind, random.Random(KILLS), 0
    unbroken, start = options.output.with_name("unbroken"), time.perf_counter()
    preprocess(replace(options, output=unbroken, scheduler=None))
    seconds, expected = time.perf_counter() - start, files_of(unbroken)
    while killed < (KILLS or (1 if options.scheduler else 2)):
        kill_after(options, draw.uniform(0, seconds))
        if (options.output / "manifest.json").exists():
            assert files_of(options.output) == expected
            atomic.remove(options.output)
            seconds *= 0.8  # so that kills hit runs also where the first one was slow
        else:
            killed += 1
    work, said = atomic.hidden(options.output, "partial"), list[str]()
    resumes = (work / "identity.json").exists() and any(work.glob("*/data"))
    preprocess(replace(options, scheduler=None), said.append)  # what a cluster has begun, too
    assert any(line.startswith("resuming an interrupted run") for line in said) == resumes
    assert files_of(options.output) == expected
    assert not any(path.name.startswith(".") for path in options.output.parent.iterdir())


@pytest.fixture
def unbroken(options: PreprocessOptions) -> dict[str, bytes]:
    """The files that a run without interruption writes."""
    preprocess(replace(options, output=options.output.with_name("unbroken")))
    return files_of(options.output.with_name("unbroken"))


def _preprocess_with_small_files(options: PreprocessOptions, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        preprocess(options)
    except OSError as error:
        options.output.with_name("message").write_text(str(error))


def test_files_may_not_grow(options: PreprocessOptions, unbroken: dict[str, bytes]) -> None:
    """The system's own limit, whether it hits Python, NumPy, Arrow or a memory-mapped file."""
    kept = "finished parts are kept: free up space or fix permissions, and run the same command again"
    for limit, remedy in ((3000, "choose a writable place with enough space"), (12_000, kept)):
        process = PROCESSES.Process(target=_preprocess_with_small_files, args=(options, limit))
        process.start()
        process.join()
        assert process.exitcode == 0
        message = options.output.with_name("message").read_text()
        assert message == f"cannot write `output` {options.output}: File too large; {remedy}"
    preprocess(options)
    assert files_of(options.output) == unbroken


@pytest.fixture
def interrupted(options: PreprocessOptions) -> PreprocessOptions:
    """Options of a run that a malformed line has ended in the second log."""
    refuse(r"day_1.gz:\d+: 1 columns where 40 are expected", preprocess, replace(options, max_bad_rows=0))
    return options


def test_what_another_run_needs_starts_over(interrupted: PreprocessOptions) -> None:
    """Other options, and another log of the same name."""
    first, elsewhere = Path(interrupted.inputs[0]), interrupted.output.with_name("elsewhere")
    elsewhere.mkdir()
    shutil.copy2(first, elsewhere)
    other = replace(interrupted, min_count=3, inputs=(elsewhere / first.name, *interrupted.inputs[1:]))
    messages: list[str] = []
    work = atomic.hidden(other.output, "partial")
    before = set(work.glob("*/shards"))
    assert before
    refuse(r"day_1.gz:\d+: 1 columns", preprocess, replace(other, max_bad_rows=0), messages.append)
    assert before.isdisjoint(work.glob("*/shards")), "workers of the former run, if any are left, find no folder to write to"
    manifest = preprocess(replace(other, overwrite=True), lambda line: None)
    assert messages == [f"`output` {other.output}: an interrupted run had different inputs and min_count; starting over"]
    assert {column.min_count for column in manifest.categorical_columns} == {3}


def test_allowing_more_bad_rows_resumes_the_run(interrupted: PreprocessOptions, unbroken: dict[str, bytes]) -> None:
    messages: list[str] = []
    preprocess(interrupted, messages.append)
    (line,) = messages
    assert line.startswith("resuming an interrupted run")
    assert files_of(interrupted.output) == unbroken


def _die_once(job: Job, part: Part, what: str, log: int) -> None:
    """Kill the first process that reaches part 3 of a log."""
    death = job.options.output.with_name(f"died {what}")
    if (part.log, part.number) == (log, 3) and not death.exists():
        death.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dying_count(job: Job, part: Part, detail: Any) -> Any:
    _die_once(job, part, "counting", 1)
    return COUNT(job, part, detail)


def dying_write(*arguments: Any) -> Any:
    job, part = arguments[1:3]
    _die_once(job, part, "writing", 0)
    return WRITE(*arguments)


def deadly_count(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
def test_workers_die(options: PreprocessOptions, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are those of the client."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr(count_pass, "_count", dying_count)
    monkeypatch.setattr(write_pass, "_write", dying_write)
    here = replace(options, inputs=tuple(Path(f"day_{i}.gz") for i in range(3)))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit=None, dashboard_address=":0", silence_logs="CRITICAL"
    ) as cluster:
        monkeypatch.chdir(options.output.parent)
        preprocess(replace(here, scheduler=cluster.scheduler_address))
    assert {path.name for path in options.output.parent.glob("died *")} == {"died counting", "died writing"}
    assert files_of(options.output) == unbroken


@pytest.mark.distributed
def test_part_that_kills_every_worker(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    dask = pytest.importorskip("dask", reason="Dask is not installed")
    monkeypatch.setattr(count_pass, "_count", deadly_count)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        pytest.raises(ValueError, match=r"`scheduler`: several workers died on the same part, .* lower `part_bytes`"),
    ):
        preprocess(replace(options, scheduler="local", workers=1))


def test_unreachable_scheduler(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr("data_pipeline.job._WAIT_SECONDS", 1)
    with socket.socket() as unused:  # no process listens on it
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        refuse(f"`scheduler` {address}: no scheduler with a worker answers", preprocess, replace(options, scheduler=address))


def test_without_dask(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    refuse(r"distributed is not installed: install the extra 'dask'", preprocess, replace(options, scheduler="local"))
