"""Atomic output: it is written under a hidden name in the same folder and renamed when it is complete.

The next run for the same output removes what an interrupted process left under the hidden name or, if the work is long
(`data_pipeline.work`), resumes it. Files and folders are synced before they are renamed, so neither appears empty after a power
failure.
"""

import errno
import fnmatch
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from data_pipeline.errors import UserError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path drops one of the slashes of s3://


def resolved(output: Path) -> Path:
    """Resolve the symbolic links in an output path.

    Raises:
        ValueError: it is a URL, a pipe or a device, leads to a link to itself, is a mount point, which nothing can be renamed to,
            holds the current folder, which would be gone, or isn't UTF-8.
    """
    if _URL.match(str(output)):
        raise UserError(f"`output` {output} is a URL, which this command can't write to; write to a local folder and copy it there")
    if os.path.ismount(output):
        raise UserError(f"`output` {output} is a mount point; name a folder in it, such as {output / 'data'}")
    if output.exists() and not output.is_file() and not output.is_dir():
        raise UserError(f"`output` {output} is a pipe or a device; name a regular file or a folder")
    target = Path(os.path.realpath(output))  # leaves links to themselves, for which `Path.resolve` raises before Python 3.13
    require_utf8("output", str(target))
    with suppress(FileNotFoundError):  # the current folder is removed
        if Path(os.path.realpath(os.curdir)).is_relative_to(target):
            raise UserError(f"`output` {output} holds the current folder, which would be replaced; name something in it")
    if any(path.is_symlink() for path in (target, *target.parents)):
        raise UserError(f"`output` {output} leads to a symbolic link to itself; remove the link, or choose another `output`")
    return target


def require_utf8(option: str, path: str) -> None:
    """Refuse a path that can't be written as UTF-8, as manifests and Arrow need it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"`{option}` {path!a} is not UTF-8; rename it") from None


def refuse_overlap(output: Path, option: str, paths: Iterable[Path | str], *, within: bool = False) -> None:
    """Refuse an output that contains paths of the setting `option`, links included, or with `within` lies in one of them.

    Raises:
        ValueError: they overlap; the message names both.
    """
    target = resolved(output)
    for path in paths:
        if isinstance(path, str):  # a URL
            continue
        origin = Path(os.path.realpath(path))
        if origin.is_relative_to(target) or (within and target.is_relative_to(origin)):
            raise UserError(f"`output` {output} and `{option}` {path} overlap; choose another `output`")


def check_output(output: Path, *, files: tuple[str, ...] | None, overwrite: bool) -> None:
    """Refuse an output that must not be written.

    Args:
        files: patterns of the paths in a finished folder; None if the output is a file. The first names a file that is always
            present: only a folder that contains it, and nothing but matching files, is ever overwritten.

    Raises:
        ValueError: output is not a finished output, has other files in it, or is finished and overwrite is false.
    """
    if files is None:
        if output.is_dir():
            raise UserError(f"`output` {output} is a folder; name a file in it")
        if output.exists() and not overwrite:
            raise UserError(f"`output` {output} already exists; add `overwrite` to replace it")
    elif (output / files[0]).exists():
        if not overwrite:
            raise UserError(f"`output` {output} already holds a finished result; add `overwrite` to replace it")
        for path in sorted(path for path in output.rglob("*") if path.is_symlink() or not path.is_dir()):
            if not any(fnmatch.fnmatchcase(path.relative_to(output).as_posix(), pattern) for pattern in files):
                raise UserError(
                    f"`output` {output} also holds {path.relative_to(output)}, which is not part of it; move that file first"
                )
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"`output` {output} exists and holds something else; choose a new or empty folder")


def require_page(path: Path) -> None:
    """Raise ValueError if a path that is to become an HTML page holds something else."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
    if path.exists():
        with path.open("rb") as file:
            if not file.read(64).lstrip().lower().startswith(b"<!doctype html"):
                raise UserError(f"{path} exists and is not an HTML page; choose another name")


def put_in_place(finished: Path, output: Path) -> None:
    """Rename a finished folder or file to `output`, replacing what is there."""
    old = hidden(output, "replaced")
    remove(old)
    if output.is_dir():
        output.rename(old)
    finished.replace(output)
    sync(output.parent)
    remove(old)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock an output against other processes, until this one ends; on other machines only if its folder's file system shares locks.

    Raises:
        ValueError: another process is writing it.
    """
    path = hidden(output, "lock")
    try:
        lock = FileLock(path).acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"`output` {output} is being written by another process; wait for it or choose another folder") from error
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside an output, which is locked; the folder is removed in the end, or by the next process.

    Raises:
        ValueError: another process is writing the output.
    """
    make_parent(output)
    folder = hidden(output, "partial")
    with locked(output):
        remove(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            remove(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is synced and renamed to `path` when the block ends, or removed if it raises."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # two workers of a cluster may write the same part
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)  # the one that the user knows
        raise
    finally:
        remove(temporary)


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # from file systems that don't sync folders
            raise
    finally:
        os.close(descriptor)


def make_parent(output: Path) -> None:
    """Create the parent folder of an output."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # what mkdir raises if a file is in the way
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def hidden(output: Path, suffix: str) -> Path:
    """Return the hidden path beside an output, for unfinished work."""
    absolute = output.absolute()
    return absolute.with_name(f".{absolute.name}.{suffix}")


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
