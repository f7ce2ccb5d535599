"""Logs and data sets at URLs are read as local ones are, with one line for whatever can't be read."""

from __future__ import annotations

import errno
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from random_logs import ROWS, files_of, make, to_text

from comera_rec.data import ParquetBatches
from data_pipeline.manifest import check_shards, read_manifest
from data_pipeline.sources import by_number, expand


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system in memory."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def test_same_data_set_as_from_disk(memory: Any, tmp_path: Path) -> None:
    contents = {"day_2.gz": gzip.compress(to_text(ROWS[:150])), "day_10": to_text(ROWS[150:])}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        memory.pipe(f"/logs/{name}", content)
    urls = by_number(expand(["memory://logs/day_*"]))
    assert urls == ("memory:///logs/day_2.gz", "memory:///logs/day_10")
    for name, inputs in (("remote", urls), ("local", tuple(tmp_path / name for name in contents))):
        make(inputs, tmp_path / name, part_bytes=10_000)
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_training_reads_a_data_set_at_a_url(memory: Any, made_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://bucket/data"
    memory.put(str(made_data), "/bucket/data", recursive=True)
    assert read_manifest(url) == read_manifest(made_data)
    remote, others = (list(ParquetBatches(data, "train", batch_size=64, shuffle=True)) for data in (url, made_data))
    assert len(remote) == 5
    for one, other in zip(remote, others, strict=True):
        assert one.dense.equal(other.dense)
        assert one.labels.equal(other.labels)
        assert one.sparse.values().equal(other.sparse.values())
    shard = "/bucket/data/" + read_manifest(url).splits["train"].shards[0].path
    memory.pipe_file(shard, memory.cat_file(shard)[:-1])
    with pytest.raises(ValueError, match=r"memory://bucket/data/train/part-00000.parquet has \d+ bytes, but the manifest states"):
        ParquetBatches(url, "train", batch_size=64)
    memory.rm_file(shard)
    with pytest.raises(ValueError, match=r"data/train/part-00000.parquet does not exist, but the manifest lists it"):
        check_shards(read_manifest(url), url)
    with pytest.raises(ValueError, match=r"memory:/bucket/data is a URL, which only training and evaluation read; copy"):
        read_manifest(Path(url))
    with pytest.raises(ValueError, match=r"memory://bucket/other is not a preprocessed data set"):
        read_manifest("memory://bucket/other")

    denied = PermissionError(errno.EACCES, "Access Denied")
    monkeypatch.setattr(MemoryFileSystem, "info", Mock(side_effect=denied))
    with pytest.raises(ValueError, match=r"cannot read memory://bucket/data/manifest.json: .*; check its name and your credent"):
        read_manifest(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere", "`input` memory://nowhere does not exist; check its name"),
        ("memory://logs", "`input` memory://logs is a folder; name the files in it, such as memory://logs/day_"),
        ("memory://empty", "`input` memory://empty is empty"),
        ("nosuch://log", "`input` nosuch://log: Protocol not known: nosuch"),
    ],
)
def test_mistakes(memory: Any, tmp_path: Path, url: str, message: str) -> None:
    memory.pipe({"/logs/day_0": b"x", "/empty": b""})
    with pytest.raises(ValueError, match=message):
        make(url, tmp_path / "data")
    assert not list(tmp_path.iterdir())


class NoCredentials(Exception):
    """An error of a library that is not an OSError, as botocore's are."""


@pytest.mark.parametrize(
    ("owner", "method"),
    [(MemoryFileSystem, "info"), (MemoryFileSystem, "open"), (MemoryFile, "read"), (MemoryFileSystem, "glob")],
)
def test_errors_of_libraries(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    memory.pipe("/logs/day_0", b"x")
    message = r"cannot read `input` memory://logs/day_.: NoCredentials: unable to locate credentials; check the file"
    monkeypatch.setattr(owner, method, Mock(side_effect=NoCredentials("unable to locate credentials")))
    with pytest.raises(ValueError, match=message):
        make(expand(["memory://logs/day_*" if method == "glob" else "memory://logs/day_0"]), tmp_path / "data")
