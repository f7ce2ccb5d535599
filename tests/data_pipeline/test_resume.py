"""A run that stopped, on a full disk or at a bad line, resumes and ends like an unbroken one; `test_kills` kills it anywhere."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from random_logs import files_of, random_rows, to_text

from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.sources import identify_log

ROWS = random_rows(700)
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture
def options(tmp_path: Path, write_log: Callable[..., Path]) -> PreprocessOptions:
    """Three logs of several parts each, with a malformed line, gzipped and split at random."""
    logs = tuple(write_log(to_text(ROWS[i::3]) + b"bad\n" * (i == 1), f"day_{i}.gz") for i in range(3))
    return PreprocessOptions(inputs=logs, output=tmp_path / "data", part_bytes=9000, max_bad_rows=1, split="random", workers=2)


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
    with pytest.raises(ValueError, match=r"day_1.gz:\d+: 1 columns where 40 are expected"):
        preprocess(replace(options, max_bad_rows=0))
    return options


def test_other_options_start_over(interrupted: PreprocessOptions) -> None:
    messages: list[str] = []
    manifest = preprocess(replace(interrupted, min_count=3), messages.append)
    assert messages == [f"`output` {interrupted.output}: an interrupted run had different min_count; starting over"]
    assert {column.min_count for column in manifest.categorical_columns} == {3}


def test_another_log_of_the_same_name_size_and_time_starts_over(interrupted: PreprocessOptions) -> None:
    options = interrupted
    first, elsewhere = options.inputs[0], options.output.with_name("elsewhere") / options.inputs[0].name
    elsewhere.parent.mkdir()
    content = bytearray(first.read_bytes())
    status = first.stat()
    messages: list[str] = []
    elsewhere.write_bytes(content)
    os.utime(elsewhere, ns=(status.st_atime_ns, status.st_mtime_ns))
    moved = replace(options, inputs=(elsewhere, *options.inputs[1:]))
    assert list(map(identify_log, moved.inputs)) == list(map(identify_log, options.inputs))
    content[4] ^= 1  # gzip's time
    elsewhere.write_bytes(content)
    os.utime(elsewhere, ns=(status.st_atime_ns, status.st_mtime_ns))
    preprocess(moved, messages.append)
    assert messages == [f"`output` {options.output}: an interrupted run had different inputs; starting over"]


def test_allowing_more_bad_rows_resumes_the_run(interrupted: PreprocessOptions, unbroken: dict[str, bytes]) -> None:
    messages: list[str] = []
    preprocess(interrupted, messages.append)
    (line,) = messages
    assert line.startswith("resuming an interrupted run")
    assert files_of(interrupted.output) == unbroken


def test_a_lost_shard_is_rewritten(options: PreprocessOptions, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.preprocess.write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        preprocess(options)
    monkeypatch.undo()
    shards = options.output.with_name(".data.partial") / "data" / "train"
    (shards / "part-00001.parquet").unlink()
    (shards / "part-00000.parquet").write_bytes(b"cut")
    preprocess(options)
    assert files_of(options.output) == unbroken
