"""Finished output appears whole or not at all: it is written beside its place under a hidden name and renamed at the end.

What an interrupted process left under the hidden name is removed by the next run for the same output, or, where the work is long
(`data_pipeline.work`), taken up again. Files and folders are synced before they are renamed, so that neither appears empty after a
power failure.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath

from filelock import SoftFileLock, Timeout

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path takes one of the slashes of s3://


def resolved(output: Path) -> Path:
    """The folder or file that an output names, behind symbolic links.

    Raises:
        ValueError: it is a URL, or a file system is mounted there, so that nothing can be renamed to it.
    """
    if _URL.match(str(output)):
        raise ValueError(
            f"--output {output} is a URL, which this command doesn't write to; write to this machine, and copy it there"
        )
    if os.path.ismount(output):
        raise ValueError(f"--output {output} is where a file system is mounted; name a folder in it, such as {output / 'data'}")
    return output.resolve()


def refuse_overlap(output: Path | str, option: str, paths: Iterable[Path | str], *, within: bool = False) -> None:
    """Refuse an output that holds what it is made of, also through symbolic links.

    Args:
        output: to be written.
        option: that names the paths.
        paths: files and folders that are read.
        within: refuse an output in one of them, too.

    Raises:
        ValueError: naming both.
    """
    target: PurePath = PurePosixPath(output) if isinstance(output, str) else resolved(output)
    for path in paths:
        origin: PurePath = PurePosixPath(path) if isinstance(path, str) else path.resolve()
        if origin.is_relative_to(target) or (within and target.is_relative_to(origin)):
            raise ValueError(f"--output {output} and --{option} {path} overlap; choose another --output")


def check_output_folder(output: Path, *, files: tuple[str, ...], overwrite: bool) -> None:
    """Refuse a folder that may not be written.

    Args:
        output: the folder to appear.
        files: what a finished output holds, as patterns of paths. The first is a file that every one holds: only a folder that
            holds it, and nothing beyond these files, is ever overwritten.
        overwrite: replace a finished output.

    Raises:
        ValueError: output is something else, holds something else too, or is finished and overwrite is false.
    """
    if (output / files[0]).exists():
        if not overwrite:
            raise ValueError(f"--output {output} already holds a finished result; add --overwrite to replace it")
        for path in _files_in(output):
            if not any(fnmatch.fnmatchcase(path.relative_to(output).as_posix(), pattern) for pattern in files):
                raise ValueError(
                    f"--output {output} also holds {path.relative_to(output)}, which is no part of it; move that first"
                )
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and holds something else; choose a new or empty folder")


def _files_in(folder: Path) -> Iterator[Path]:
    """Files, and links to files or folders."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files_in(path)
        else:
            yield path


def check_output_file(output: Path, *, overwrite: bool) -> None:
    """Refuse a file that may not be written.

    Raises:
        ValueError: output is a folder, or exists and overwrite is false.
    """
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file in it")
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output} already exists; add --overwrite to replace it")


def put_in_place(finished: Path, output: Path) -> None:
    """Rename a finished folder or file to `output`, which then vanishes if it was there."""
    old = hidden(output, "replaced")
    remove(old)
    if output.exists():
        output.rename(old)
    finished.rename(output)
    sync(output.parent)
    remove(old)


@contextmanager
def locked(output: Path, tell: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Hold an output against other processes, of this machine or another one that shares its folder.

    The lock is a file beside the output that names its process, created exclusively, which network file systems grant to one. Where
    that process is of this machine and no longer runs, its lock is taken over.

    Raises:
        ValueError: another process is at it.
    """
    lock = SoftFileLock(hidden(output, "lock"))
    left_by = lock.pid
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"--output {output} is being written by another process ({_holder(lock)}); wait for it or choose another folder, "
            f"or remove {lock.lock_file} if that process is gone"
        ) from error
    try:
        if left_by:
            tell(f"--output {output}: taking over from process {left_by}, which is gone")
        yield
    finally:
        lock.release()


def _holder(lock: SoftFileLock) -> str:
    try:
        process, host, *_ = Path(lock.lock_file).read_text().splitlines()
    except (OSError, ValueError):
        return "unknown"
    return f"{process} on {host}"


@contextmanager
def finished_folder(output: Path, *, files: tuple[str, ...], overwrite: bool) -> Iterator[Path]:
    """Give a work folder that becomes `output` when the block ends, and vanishes when it raises.

    Args:
        output, files, overwrite: as for `check_output_folder`; parents are made.

    Raises:
        ValueError: output may not be written.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    output = resolved(output)
    check_output_folder(output, files=files, overwrite=overwrite)
    with _work_beside(output) as work:
        work.mkdir()
        yield work
        for path in (*_files_in(work), work):
            sync(path)
        put_in_place(work, output)


@contextmanager
def finished_file(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write that becomes the file `output` when the block ends, and vanishes when it raises.

    Raises:
        ValueError: output is a folder, or exists and overwrite is false.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    output = resolved(output)
    check_output_file(output, overwrite=overwrite)
    with _work_beside(output) as work:
        yield work
        sync(work)
        work.replace(output)
        sync(output.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write that becomes the file `path` when the block ends well, synced to disk first."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # two workers of a cluster may be at the same part
    try:
        yield beside
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    finally:
        remove(beside)


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems that sync no folders
            raise
    finally:
        os.close(descriptor)


def make_parent(output: Path) -> None:
    """Make the folder that an output is to be in."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # mkdir's word for a file in the way
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def reason_of(error: OSError) -> str:
    """What the system says, without names of files."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextmanager
def _work_beside(output: Path) -> Iterator[Path]:
    work = hidden(output, "partial")
    try:
        make_parent(output)
        with locked(output):
            try:
                remove(work)
                yield work
            finally:
                remove(work)
    except OSError as error:
        raise OSError(f"cannot write --output {output}: {reason_of(error)}; choose a writable place with enough space") from error


def hidden(output: Path, suffix: str) -> Path:
    """The hidden name beside an output, for what is not finished."""
    absolute = output.absolute()
    return absolute.with_name(f".{absolute.name}.{suffix}")


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
