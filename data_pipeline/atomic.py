"""Finished output appears whole or not at all: it is written beside its place under a hidden name and renamed at the end.

What an interrupted process left under the hidden name is removed by the next run for the same output.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def finished_folder(output: Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """Give a work folder that becomes `output` when the block ends, and vanishes when it raises.

    Args:
        output: the folder to appear; its parents are made.
        marker: a file that every finished output holds. Only a folder that holds it is ever overwritten.
        overwrite: replace a finished output.

    Raises:
        ValueError: output is something else, or is finished and overwrite is false.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    if (output / marker).exists():
        if not overwrite:
            raise ValueError(f"--output {output} already holds a finished result; add --overwrite to replace it")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and holds something else; choose a new or empty folder")
    work, old = _hidden(output, "partial"), _hidden(output, "replaced")
    with _cleaned(work, output):
        work.mkdir(parents=True)
        yield work
        _remove(old)
        if output.exists():
            output.rename(old)
        work.rename(output)
        _remove(old)


@contextmanager
def finished_file(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write that becomes the file `output` when the block ends, and vanishes when it raises.

    Raises:
        ValueError: output is a folder, or exists and overwrite is false.
        OSError: it cannot be written (no permission, disk full); the message names it.
    """
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file, such as {output / 'train.txt'}")
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output} already exists; add --overwrite to replace it")
    work = _hidden(output, "partial")
    with _cleaned(work, output):
        output.parent.mkdir(parents=True, exist_ok=True)
        yield work
        work.replace(output)


@contextmanager
def _cleaned(work: Path, output: Path) -> Iterator[None]:
    try:
        _remove(work)
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"cannot write --output {output}: {reason}; choose a writable place with enough space") from error
    finally:
        _remove(work)


def _hidden(output: Path, suffix: str) -> Path:
    resolved = output.absolute()
    return resolved.with_name(f".{resolved.name}.{suffix}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
