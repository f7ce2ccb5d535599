"""Passes on a Dask cluster write the same bytes as on threads, even if workers die or the run was started on threads."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_logs import files_of, random_rows

from data_pipeline import count_pass, write_pass
from data_pipeline.job import Job
from data_pipeline.parts import Part
from data_pipeline.preprocess import PreprocessOptions, preprocess

dask = pytest.importorskip("dask", reason="Dask is not installed")
distributed = pytest.importorskip("distributed", reason="Dask is not installed")
pytestmark = pytest.mark.distributed
ROWS = random_rows(900)
COUNT, WRITE = count_pass._count, write_pass._write


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a cluster of two processes."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit=None, dashboard_address=":0", silence_logs="CRITICAL"
    ) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def options(tmp_path: Path, write_log: Callable[..., Path]) -> PreprocessOptions:
    """A gzipped log and a plain one, each of several parts."""
    logs = (write_log(ROWS[:300], "day_0.gz"), write_log(ROWS[300:], "day_1"))
    return PreprocessOptions(inputs=logs, output=tmp_path / "dask", part_bytes=9000)


@pytest.fixture
def on_threads(options: PreprocessOptions) -> dict[str, bytes]:
    """The files that a run on threads writes."""
    preprocess(replace(options, output=options.output.with_name("threads")))
    return files_of(options.output.with_name("threads"))


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


def test_workers_die(
    scheduler: str, options: PreprocessOptions, on_threads: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_pass, "_count", dying_count)
    monkeypatch.setattr(write_pass, "_write", dying_write)
    preprocess(replace(options, scheduler=scheduler))
    assert {path.name for path in options.output.parent.glob("died *")} == {"died counting", "died writing"}
    assert files_of(options.output) == on_threads


def test_part_that_kills_every_worker(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_pass, "_count", deadly_count)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        pytest.raises(ValueError, match=r"`scheduler`: several workers died on the same part, .* lower `part_bytes`"),
    ):
        preprocess(replace(options, scheduler="local", workers=1))


def test_resumes_where_threads_stopped(
    scheduler: str, options: PreprocessOptions, on_threads: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are those of the client."""
    monkeypatch.chdir(options.output.parent)
    here = replace(options, inputs=tuple(Path(log.name) for log in options.inputs if isinstance(log, Path)))
    monkeypatch.setattr("data_pipeline.preprocess.write_logs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        preprocess(here)
    monkeypatch.undo()
    monkeypatch.chdir(options.output.parent)
    messages: list[str] = []
    preprocess(replace(here, scheduler=scheduler), messages.append)
    assert "resuming an interrupted run" in messages[0]
    assert files_of(options.output) == on_threads


def test_unreachable_scheduler(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.job._WAIT_SECONDS", 1)
    with socket.socket() as unused:  # no process listens on it
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"`scheduler` {address}: no scheduler with a worker answers"):
            preprocess(replace(options, scheduler=address))


def test_without_dask(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"distributed is not installed: install the extra 'dask'"):
        preprocess(replace(options, scheduler="local"))
