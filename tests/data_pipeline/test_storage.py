"""Data sets written to URLs: the same bytes as on disk, never an incomplete one that looks complete, one line for each error."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from random_logs import files_of, random_rows, to_text

from comera_rec.cli.data import preprocess as preprocess_command
from comera_rec.data import ParquetBatches
from data_pipeline.manifest import check_shards, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.transform import TransformOptions, transform

URL = "memory://bucket/data"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "staging"))
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


@pytest.fixture
def options(tmp_path: Path) -> PreprocessOptions:
    (tmp_path / "log.tsv").write_bytes(to_text(random_rows(300)))
    return PreprocessOptions(inputs=(tmp_path / "log.tsv",), output=URL, part_bytes=9000)


def contents(memory: Any) -> dict[str, bytes]:
    return {path.removeprefix("/bucket/data/"): memory.cat_file(path) for path in memory.find("/bucket/data")}


def staged(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "staging").rglob("*") if path.is_file()]


def test_same_bytes_as_on_disk(memory: Any, options: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(options)
    preprocess(replace(options, output=tmp_path / "disk"))
    preprocess(replace(options, output=f"file://{tmp_path}/by-url"))
    actual = contents(memory)
    assert actual.pop("manifest.json") == (tmp_path / "disk" / "manifest.json").read_bytes()
    assert actual == files_of(tmp_path / "disk", manifest=False) == files_of(tmp_path / "by-url", manifest=False)
    assert staged(tmp_path) == []
    new = TransformOptions(inputs=options.inputs, data=tmp_path / "disk", output="memory://bucket/new", split="test")
    assert transform(new) == read_manifest("memory://bucket/new")


def test_training_reads_a_data_set_at_a_url(memory: Any, options: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(options)
    preprocess(replace(options, output=tmp_path / "disk"))
    remote, local = (list(ParquetBatches(data, "train", batch_size=64, shuffle=True)) for data in (URL, tmp_path / "disk"))
    assert len(remote) == 4
    for one, other in zip(remote, local, strict=True):
        assert one.dense.equal(other.dense)
        assert one.labels.equal(other.labels)
        assert one.sparse.values().equal(other.sparse.values())
    shard = "/bucket/data/" + read_manifest(URL).splits["train"].shards[0].path
    memory.pipe_file(shard, memory.cat_file(shard)[:-1])
    with pytest.raises(ValueError, match=r"memory://bucket/data/train/part-00000.parquet has \d+ bytes, but the manifest states"):
        ParquetBatches(URL, "train", batch_size=64)
    memory.rm_file(shard)
    with pytest.raises(
        ValueError, match=r"memory://bucket/data/train/part-00000.parquet does not exist, but the manifest lists it"
    ):
        check_shards(read_manifest(URL), URL)
    with pytest.raises(
        ValueError, match=r"memory:/bucket/data is a URL, which only training and evaluation read; copy the data set"
    ):
        read_manifest(Path(URL))
    with pytest.raises(ValueError, match=r"memory://bucket/other is not a preprocessed data set"):
        read_manifest("memory://bucket/other")


@pytest.mark.parametrize("fails_at", [1, 2, 30, 60])
def test_interrupted_while_uploading(
    memory: Any, options: PreprocessOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """There is no manifest until all files are there, whatever was there before; the same command finishes the upload."""
    preprocess(replace(options, seed=1, min_count=1))
    put, calls = MemoryFileSystem.put_file, []

    def put_some(self: Any, local: str, remote: str, **options: Any) -> None:
        calls.append(remote)
        if len(calls) == fails_at:
            raise OSError(errno.EIO, "Input/output error")
        put(self, local, remote, **options)

    again = replace(options, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_some)
        with pytest.raises(OSError, match=r"cannot write `output` memory://bucket/data: Input/output error; finished parts are"):
            preprocess(again)
    assert "manifest.json" not in contents(memory)
    messages: list[str] = []
    preprocess(again, tell=messages.append)
    assert any("interrupted run" in line for line in messages)
    preprocess(replace(options, output=tmp_path / "disk"))
    actual = contents(memory)
    assert actual.pop("manifest.json") == (tmp_path / "disk" / "manifest.json").read_bytes()
    assert actual == files_of(tmp_path / "disk", manifest=False)


def test_existing_files_are_kept(memory: Any, options: PreprocessOptions) -> None:
    preprocess(options)
    before = contents(memory)
    with pytest.raises(ValueError, match=r"`output` memory://bucket/data already holds a finished result; add `overwrite`"):
        preprocess(options)
    memory.pipe_file("/bucket/data/notes.txt", b"notes")
    with pytest.raises(ValueError, match=r"`output` memory://bucket/data also holds notes.txt, which is not part of it; move that"):
        preprocess(replace(options, overwrite=True))
    assert contents(memory) == before | {"notes.txt": b"notes"}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "NoCredentialsError: Unable to locate cr"),
        (PermissionError(errno.EACCES, "Access Denied"), "Permission denied; "),
    ],
)
def test_refused_by_the_store(
    memory: Any, options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    result = CliRunner().invoke(preprocess_command, ["--input", str(options.inputs[0]), "--output", URL])
    assert isinstance(result.exception, OSError)
    assert str(result.exception).startswith(f"cannot write `output` memory://bucket/data: {line}")
    assert str(result.exception).endswith("; check its name and your credentials")
    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(ValueError, match=r"cannot read memory://bucket/data/manifest.json: .*; check its name and your credent"):
        read_manifest(URL)
