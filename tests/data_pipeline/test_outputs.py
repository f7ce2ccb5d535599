"""Outputs: inputs are never destroyed, links are followed, runs don't write to the same place, and names are kept."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from random_logs import random_rows, to_text

from data_pipeline import atomic
from data_pipeline.manifest import MANIFEST_NAME, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.transform import TransformOptions
from data_pipeline.work import work_folder

WriteLog = Callable[..., Path]
ROWS = random_rows(30)


@pytest.fixture
def options(tmp_path: Path, write_log: WriteLog) -> PreprocessOptions:
    return PreprocessOptions(inputs=(write_log(ROWS),), output=tmp_path / "data")


def test_inputs_in_the_output_stay(options: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(options)
    inside = options.output / "today.tsv"
    inside.write_bytes(to_text(ROWS))
    (tmp_path / "link").symlink_to(options.output)
    for output, log in ((options.output, inside), (tmp_path / "link", inside), (options.output, tmp_path / "link" / "today.tsv")):
        with pytest.raises(ValueError, match=r"`output` .* and `input` .*today.tsv overlap; choose another `output`"):
            preprocess(replace(options, inputs=(log,), output=output, overwrite=True))
    assert inside.read_bytes() == to_text(ROWS)


@pytest.mark.parametrize("name", ["run/checkpoint.pt", "train/model.ckpt", "link"])
def test_other_files_in_the_output_stay(data: Path, options: PreprocessOptions, name: str) -> None:
    precious = data / name
    precious.parent.mkdir(exist_ok=True)
    precious.symlink_to(options.inputs[0]) if name == "link" else precious.write_text("precious")
    with pytest.raises(ValueError, match=rf"`output` .*data also holds {name}, which is not part of it; move that file first"):
        preprocess(replace(options, overwrite=True))
    assert precious.exists()


def test_a_transformed_data_set_never_overwrites_its_data(options: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(options)
    (tmp_path / "link").symlink_to(options.output)
    for data, output in (
        (tmp_path / "link", options.output),
        (options.output, tmp_path / "link"),
        (options.output, options.output / "new"),
    ):
        with pytest.raises(ValueError, match=r"`output` .* and `data` .* overlap; choose another `output`"):
            TransformOptions(inputs=options.inputs, data=data, output=output, overwrite=True)


def test_output_behind_a_link(options: PreprocessOptions, tmp_path: Path) -> None:
    """The link stays, and the data set is written to its target, on the target's file system."""
    (tmp_path / "disk").mkdir()
    options.output.symlink_to(tmp_path / "disk" / "data")
    for overwrite in (False, True):
        preprocess(replace(options, overwrite=overwrite))
        assert options.output.is_symlink()
        assert read_manifest(tmp_path / "disk" / "data").rows.written == 30
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["data"]


def test_urls_and_mounts_are_refused_as_output(options: PreprocessOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"`output` s3:/bucket/data is a URL, which this command can't write to; write to a local"):
        preprocess(replace(options, output=Path("s3://bucket/data")))
    with pytest.raises(ValueError, match=r"`input` gs://bucket/log: .*; run pip install s3fs for s3://, gcsfs for gs://"):
        preprocess(replace(options, inputs=("gs://bucket/log",)))
    mounted = Path("/proc")
    with pytest.raises(ValueError, match=r"`output` /proc is a mount point; name a folder in it, such as /proc/d"):
        preprocess(replace(options, output=mounted))
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]


def test_one_log_under_two_names(options: PreprocessOptions, tmp_path: Path) -> None:
    log = options.inputs[0]
    assert isinstance(log, Path)
    (tmp_path / "soft").symlink_to(log)
    (tmp_path / "hard").hardlink_to(log)
    for other in (log, tmp_path / "soft", tmp_path / "hard"):
        with pytest.raises(ValueError, match=rf"`input` .*{other.name} and .*log.tsv are the same file; give each log once"):
            replace(options, inputs=(log, other))
    replace(options, inputs=("https://a.b/get?day=0", "https://a.b/get?day=1"))


def _hold(output: Path, ready: object) -> None:
    with work_folder(output, identity={}, files=(MANIFEST_NAME,), overwrite=False, tell=print):
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_lock_of_a_process(options: PreprocessOptions) -> None:
    """It lasts as long as its process."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_hold, args=(options.output, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match=r"`output` .*data is being written by another process; wait for it or choose another"):
        preprocess(options)
    process.kill()
    process.join()
    preprocess(options)
    assert not [path.name for path in options.output.parent.iterdir() if path.name.startswith(".")]


def test_everything_is_synced_before_it_is_renamed(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(re.sub(r"\.([^/]*)\.[0-9a-f]{32}\.tmp$", r"\1", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", note)
    preprocess(options)
    work = options.output.with_name(".data.partial") / "data"
    written = [work / path.relative_to(options.output) for path in (options.output, *options.output.rglob("*"))]
    assert {str(path) for path in written} - synced == set()
    assert str(options.output.parent) in synced
