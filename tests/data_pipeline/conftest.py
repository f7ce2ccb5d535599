"""Fixtures for all tests of the pipeline: a log in a file, a data set made of one, and files at URLs."""

import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from random_logs import ROWS, Rows, make, to_text


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """`write_log(rows or bytes, name="log.tsv")` -> the path of a log with that content; .gz compresses."""

    def write(content: Rows | bytes, name: str = "log.tsv") -> Path:
        text = content if isinstance(content, bytes) else to_text(content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return write


@pytest.fixture(scope="session")
def made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several shards, made of `ROWS`; its files must stay as they are."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "log.tsv").write_bytes(to_text(ROWS))
    make(folder / "log.tsv", folder / "data", part_bytes=10_000)
    return folder / "data"


@pytest.fixture
def data(made_data: Path, tmp_path: Path) -> Path:
    """A copy of the data set made of `ROWS`."""
    return shutil.copytree(made_data, tmp_path / "data")


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system in memory."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
