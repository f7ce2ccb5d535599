"""Locations of logs and data sets: local files, or any URL that fsspec reads, such as s3://, gs://, https:// and memory://."""

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeGuard, cast

import fsspec.core
import pyarrow as pa

from data_pipeline.atomic import require_utf8
from data_pipeline.errors import UserError

Source = Path | str  # a URL is a str, because Path would drop one of its slashes
# Names that file systems give to the version or modification time of a file.
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
_STREAM_BLOCK = 8 << 20
_HTTP = re.compile(r"(\w+::)*https?://")


@dataclass(frozen=True, kw_only=True)
class LogIdentity:
    """Identity of a log, to detect changes: its name and size in bytes, and its version.

    The version is the time or tag of its last change. A local file's also has its path, so a log that moved is another one.
    """

    name: str
    bytes: int
    version: str


def is_url(text: object) -> TypeGuard[str]:
    """Whether a text is a URL."""
    return isinstance(text, str) and "://" in text


def source(text: str) -> Source:
    """Convert a text to a path unless it is a URL of something else than a local file."""
    path = text.removeprefix("file://")
    return path if is_url(path) else Path(path)


def name_of(log: Source) -> str:
    """Return a log's name without its folder or the query of its URL, which may contain a signature."""
    if isinstance(log, Path):
        return log.name
    return (log.partition("?")[0] if _HTTP.match(log) else log).rpartition("/")[2]


def refuse_twice(logs: tuple[Source, ...]) -> None:
    """Refuse a log that is given twice, even under different names, because its rows could be in several splits.

    Raises:
        ValueError: two inputs are the same file; the message names both.
    """
    seen: dict[object, Source] = {}
    for log in map(source, map(str, logs)):
        status = log.stat() if isinstance(log, Path) and log.exists() else None
        key = (status.st_dev, status.st_ino) if status else log
        if key in seen:
            raise UserError(f"`input` {log} and {seen[key]} are the same file; give each log once")
        seen[key] = log


def identify_log(log: Source) -> LogIdentity:
    """Return the current identity of a log.

    Raises:
        ValueError: the log is missing, a folder or empty, or can't be reached.
    """
    require_utf8("input", name_of(log))
    try:
        if isinstance(log, Path):
            status = log.stat()
            if not (log.is_file() or log.is_dir()):
                raise UserError(f"`input` {log} is a pipe or a device, and logs are read twice; write it to a file")
            folder, size = log.is_dir(), status.st_size
            version = f"{status.st_mtime_ns} {log.resolve()}"
        else:
            info = _info(log)
            folder, size = info["type"] == "directory", info["size"]
            version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    except FileNotFoundError as error:
        raise UserError(f"`input` {log} does not exist; check its name") from error
    except OSError as error:
        raise unreadable(log, error) from error
    if folder:
        raise UserError(f"`input` {log} is a folder; name the files in it, such as {log}/day_*.gz")
    if size is None:
        raise UserError(f"`input` {log}: its server reports no size, which is needed to cut a log into parts; download it first")
    if not size:
        raise empty(log)
    return LogIdentity(name=name_of(log), bytes=size, version=version)


def _info(url: str) -> dict[str, Any]:
    with errors_of(url):
        files, path = file_system(url)
        files.invalidate_cache()  # or this process would miss a change
        return cast(dict[str, Any], files.info(path))


def open_log(log: Source, *, streamed: bool = False) -> BufferedIOBase:
    """Open a log for reading: sequentially if streamed, else range by range, each range in one request."""
    if isinstance(log, Path):
        return log.open("rb")
    options = {"cache_type": "readahead", "block_size": _STREAM_BLOCK} if streamed else {"cache_type": "none"}
    with errors_of(log):
        files, path = file_system(log)
        return cast(BufferedIOBase, _Remote(log, files.open(path, "rb", **options), files))


class _Remote:
    """A file behind a URL, whose methods raise its library's errors as OSErrors."""

    def __init__(self, log: Source, file: Any, files: Any) -> None:
        self._log, self._file, self._files = log, file, files  # an archive's file ends with its file system

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._file, name)
        return partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        with errors_of(self._log):
            return method(*arguments)

    def __enter__(self) -> "_Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def errors_of(log: Source) -> Iterator[None]:
    """Raise the errors of a URL's library, such as botocore's, as OSErrors."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def expand(texts: Iterable[str]) -> tuple[Source, ...]:
    """Convert texts to paths and URLs; those with * or ? are replaced by matching files, where no shell has done so.

    Raises:
        ValueError: no file matches.
    """
    logs: list[Source] = []
    for text in texts:
        log = source(text)
        if not re.search(r"[*?]", str(log)) or (isinstance(log, Path) and log.exists()):
            logs.append(log)
            continue
        matches: list[Any]
        if isinstance(log, Path):
            matches = [Path(path) for path in glob.glob(str(log))]
        else:
            try:
                with errors_of(log):
                    files, pattern = file_system(log)
                    matches = [str(files.unstrip_protocol(path)) for path in files.glob(pattern)]
            except OSError as error:
                raise unreadable(log, error) from error
        if not matches:
            raise UserError(f"`input` {log} matches no file; check its name")
        logs += sorted(matches)
    return tuple(logs)


def by_number(logs: tuple[Source, ...]) -> tuple[Source, ...]:
    """Sort alphabetically ordered logs, as shells expand day_*, by the numbers in their names: day_2 before day_10.

    Logs in any other order are returned unchanged, because it is taken to be intentional.
    """
    texts = [str(log) for log in logs]
    if texts != sorted(texts):
        return logs
    return tuple(sorted(logs, key=lambda log: [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", str(log))]))


def unreadable(log: Source, error: OSError) -> UserError:
    """Return the error for a log that can't be read."""
    reason = error.strerror or (str(error).splitlines() or ["unknown error"])[0]  # Arrow's messages have several lines
    return UserError(f"cannot read `input` {log}: {reason}; check the file and its permissions")


def empty(log: Source) -> UserError:
    """Return the error for an empty log."""
    return UserError(f"`input` {log} is empty; leave it out or fetch it again")


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ValueError: the file system is unknown, or needs a package that isn't installed; the message says which.
    """
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"`input` {url}: {error}; run pip install s3fs for s3://, gcsfs for gs://") from error
    except ValueError as error:
        raise UserError(f"`input` {url}: {error}") from error
    return files, path


def join(folder: Source, name: str) -> Source:
    """Return the path or URL of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else Path(folder) / name


def size_of(file: Source) -> int | None:
    """Return the bytes of a file; None if it doesn't exist.

    Raises:
        ValueError: its store can't be reached.
    """
    if isinstance(file, Path):
        return file.stat().st_size if file.is_file() else None
    with _reached(file):
        try:
            info = _info(file)
        except FileNotFoundError:
            return None
    return int(info["size"]) if info["type"] == "file" else None


def read(file: Source) -> bytes:
    """Read a whole file."""
    with _reached(file), open_log(file, streamed=True) as opened:
        return opened.read()


def open_ranges(file: Source) -> Path | pa.PythonFile:
    """Open a file for Arrow to read in ranges: returns a local path, which Arrow can map, or an open remote file."""
    return file if isinstance(file, Path) else pa.PythonFile(open_log(file), mode="r")


@contextmanager
def _reached(file: Source) -> Iterator[None]:
    try:
        with errors_of(file):
            yield
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}; check its name and your credentials") from error
