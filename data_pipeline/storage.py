"""Data sets at URLs of object stores: uploaded as a whole, and read in ranges.

Object stores can't rename, so the manifest is uploaded last and removed first: without it, files are not a data set.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_pipeline.errors import UserError
from data_pipeline.sources import Source, errors_of, file_system, is_url, open_log

_THREADS = 4
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "memory"}


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


class Destination:
    """A URL to upload a data set to.

    Args:
        files: patterns of the paths in a data set; the first names the file that marks it as complete.

    Raises:
        ValueError: the file system is unknown, or needs a package that isn't installed.
    """

    def __init__(self, url: str, files: tuple[str, ...]) -> None:
        self.url, self._patterns = url.rstrip("/"), files
        self._files, path = file_system(self.url, option="output")
        self._root = path.rstrip("/")

    @property
    def staging(self) -> Path:
        """Local folder below $TMPDIR in which the data set is made; the same for every run to this URL."""
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"comera-rec-{os.getuid()}" / name

    def check(self, *, overwrite: bool) -> None:
        """Refuse a URL that must not be written.

        Raises:
            ValueError: it has a data set and `overwrite` is false, or has other files.
            OSError: the store refuses a request.
        """
        with errors_of(self.url):
            present = self._present()
            if self._patterns[0] in present and not overwrite:
                raise UserError(f"`output` {self.url} already holds a finished result; add `overwrite` to replace it")
            for name in sorted(present):
                if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
                    raise UserError(f"`output` {self.url} also holds {name}, which is not part of it; move that file first")

    def put(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Upload a finished data set, the manifest last, replacing an earlier one.

        Raises:
            OSError: the store refuses a file, or stores another size of it.
        """
        first, names = self._patterns[0], sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        tell(f"uploading {len(names)} files to {self.url}")
        with errors_of(self.url):
            stale = self._present()
            for name in sorted(stale - {*names} | stale & {first}):
                self._files.rm_file(self._path(name))
            self._make_parents(names)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(lambda name: self._put(folder, name), [name for name in names if name != first]))
            self._put(folder, first)

    def _put(self, folder: Path, name: str) -> None:
        self._files.put_file(str(folder / name), self._path(name))
        if (size := self._files.size(self._path(name))) != (folder / name).stat().st_size:
            raise OSError(f"{name} has {size} bytes there, not {(folder / name).stat().st_size}")

    def _present(self) -> set[str]:
        self._files.invalidate_cache()
        try:
            return {path.removeprefix(self._root).lstrip("/") for path in self._files.find(self._root)}
        except FileNotFoundError:
            return set()

    def _make_parents(self, names: list[str]) -> None:
        """Create folders if the file system has them; an object store would try to create a bucket instead."""
        protocols: Any = self._files.protocol
        if not _WITHOUT_FOLDERS & {*([protocols] if isinstance(protocols, str) else protocols)}:
            for folder in {self._path(name).rpartition("/")[0] for name in names}:
                self._files.makedirs(folder, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
