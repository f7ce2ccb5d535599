"""Data sets in folders or at URLs of object stores, which are read in ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from data_pipeline.errors import UserError
from data_pipeline.sources import Source, errors_of, file_system, is_url, open_log


def join(folder: Source, name: str) -> Source:
    """Return the path or URL of a file in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder.rstrip('/')}/{name}" if is_url(folder) else Path(folder) / name


def size_of(file: Source) -> int | None:
    """Return the bytes of a file; None if it doesn't exist.

    Raises:
        ValueError: its store can't be reached.
    """
    if isinstance(file, Path):
        return file.stat().st_size if file.is_file() else None
    with _reached(file):
        files, path = file_system(file)
        files.invalidate_cache()
        try:
            info = files.info(path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None


def read(file: Source) -> bytes:
    """Read a whole file."""
    if isinstance(file, Path):
        return file.read_bytes()
    with _reached(file), open_log(file, streamed=True) as opened:
        return opened.read()


def open_ranges(file: Source) -> Path | pa.PythonFile:
    """Open a file for Arrow to read in ranges: returns a local path, which Arrow can map, or an open remote file."""
    return file if isinstance(file, Path) else pa.PythonFile(open_log(file), mode="r")


@contextmanager
def _reached(url: str) -> Iterator[None]:
    try:
        with errors_of(url):
            yield
    except OSError as error:
        raise UserError(f"cannot read {url}: {error.strerror or error}; check its name and your credentials") from error
