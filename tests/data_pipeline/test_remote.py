"""Logs at URLs give the same data set as local files, and one line for whatever can't be read."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from random_logs import files_of, random_rows, to_text

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
        preprocess(PreprocessOptions(inputs=(url,), output=tmp_path / "data"))
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
        preprocess(PreprocessOptions(inputs=(url,), output=tmp_path / "data"))
    with pytest.raises(ValueError, match=r"cannot read `input` denied://logs/\*: NoCredentials: unable to locate"):
        expand(["denied://logs/*"])
