"""Logs and data sets at URLs are read as local ones are, with one line for whatever can't be read."""

from __future__ import annotations

import errno
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from random_logs import files_of, make, random_rows, to_text

from comera_rec.data import ParquetBatches
from data_pipeline.manifest import check_shards, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.sources import by_number, expand

ROWS = random_rows(400)


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
    local = tuple(tmp_path / name for name in contents)
    for name, inputs in (("remote", urls), ("local", local)):
        preprocess(PreprocessOptions(inputs=inputs, output=tmp_path / name, part_bytes=10_000))
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_training_reads_a_data_set_at_a_url(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.tsv").write_bytes(to_text(ROWS))
    local, url = tmp_path / "data", "memory://bucket/data"
    make(tmp_path / "log.tsv", local, part_bytes=9000)
    memory.put(str(local), "/bucket/data", recursive=True)
    assert read_manifest(url) == read_manifest(local)
    remote, others = (list(ParquetBatches(data, "train", batch_size=64, shuffle=True)) for data in (url, local))
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

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
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


def test_only_alphabetic_order_is_corrected() -> None:
    def logs(*numbers: int) -> tuple[Path, ...]:
        return tuple(Path(f"raw/day_{number}.gz") for number in numbers)

    assert by_number(logs(0, 1, 10, 11, 2, 23, 3)) == logs(0, 1, 2, 3, 10, 11, 23)
    assert by_number(logs(3, 1, 2)) == logs(3, 1, 2)


class Denied(MemoryFileSystem):
    """A file system that fails with its library's own error, which is not an OSError, as botocore does."""

    protocol = "denied"

    class NoCredentials(Exception):
        pass

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if "secret" in path:
            raise self.NoCredentials("unable to locate credentials")
        return {"name": path, "size": 10, "type": "file"}

    def glob(self, path: str, **_: Any) -> list[str]:
        raise self.NoCredentials("unable to locate credentials")

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        if "closed" in path:
            raise self.NoCredentials("token expired")
        return self.Broken()

    class Broken(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise Denied.NoCredentials("connection lost")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("denied://secret", "cannot read `input` denied://secret: NoCredentials: unable to locate credentials; check the file"),
        ("denied://closed", "cannot read `input` denied://closed: NoCredentials: token expired; check the file"),
        ("denied://log", "cannot read `input` denied://log: NoCredentials: connection lost; check the file"),
    ],
)
def test_errors_of_libraries(tmp_path: Path, url: str, message: str) -> None:
    fsspec.register_implementation("denied", Denied, clobber=True)
    with pytest.raises(ValueError, match=message):
        make(url, tmp_path / "data")
    with pytest.raises(ValueError, match=r"cannot read `input` denied://logs/\*: NoCredentials: unable to locate"):
        expand(["denied://logs/*"])
