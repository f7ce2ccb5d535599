"""Finished output appears whole or not at all: it is written beside its place under a hidden name and renamed at the end.

What an interrupted process left under the hidden name is removed by the next run for the same output, or, where the work is long
(`data_pipeline.work`), taken up again.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_output_folder(output: Path, *, marker: str, overwrite: bool) -> None:
    """Refuse a folder that may not be written.

    Args:
        output: the folder to appear.
        marker: a file that every finished output holds. Only a folder that holds it is ever overwritten.
        overwrite: replace a finished output.

    Raises:
        ValueError: output is something else, or is finished and overwrite is false.
    """
    if (output / marker).exists():
        if not overwrite:
            raise ValueError(f"--output {output} already holds a finished result; add --overwrite to replace it")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and holds something else; choose a new or empty folder")


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
    remove(old)


@contextmanager
def finished_folder(output: Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """Give a work folder that becomes `output` when the block ends, and vanishes when it raises.

    Args:
        output, marker, overwrite: as for `check_output_folder`; parents are made.

    Raises:
        ValueError: output may not be written.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    check_output_folder(output, marker=marker, overwrite=overwrite)
    work = hidden(output, "partial")
    with _cleaned(work, output):
        work.mkdir(parents=True)
        yield work
        put_in_place(work, output)


@contextmanager
def finished_file(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write that becomes the file `output` when the block ends, and vanishes when it raises.

    Raises:
        ValueError: output is a folder, or exists and overwrite is false.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    check_output_file(output, overwrite=overwrite)
    work = hidden(output, "partial")
    with _cleaned(work, output):
        output.parent.mkdir(parents=True, exist_ok=True)
        yield work
        work.replace(output)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write that becomes the file `path` when the block ends well, synced to disk first."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # two workers of a cluster may be at the same part
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        remove(beside)


def reason_of(error: OSError) -> str:
    """What the system says, without names of files."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextmanager
def _cleaned(work: Path, output: Path) -> Iterator[None]:
    try:
        remove(work)
        yield
    except OSError as error:
        raise OSError(f"cannot write --output {output}: {reason_of(error)}; choose a writable place with enough space") from error
    finally:
        remove(work)


def hidden(output: Path, suffix: str) -> Path:
    """The hidden name beside an output, for what is not finished."""
    resolved = output.absolute()
    return resolved.with_name(f".{resolved.name}.{suffix}")


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
