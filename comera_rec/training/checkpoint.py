"""Checkpoints that are either whole or not there: written beside, synced to disk, then renamed.

    checkpoints/step_00001000.pt
    checkpoints/step_00002000.pt

A file holds one dictionary of tensors, numbers, strings and containers of them, so that loading runs no code from the file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

_TEMPORARY = ".partial"


def save_checkpoint(folder: str | Path, step: int, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write the state of a step, then delete all but the newest `keep` checkpoints and whatever a killed process left half-written.

    Args:
        folder: where the checkpoints lie; made if need be. One process writes to it.
        step: optimizer steps taken.
        state: tensors, numbers, strings, and dictionaries, lists and tuples of them.
        keep: how many checkpoints stay.

    Raises:
        ValueError: keep or step out of range.
        OSError: the file cannot be written, for want of space or permission; earlier checkpoints are then untouched.

    Returns:
        The file's path.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
    if not 0 <= step <= 99_999_999:
        raise ValueError(f"step must be in 0..99999999, for file names that sort, got {step}")
    folder = Path(folder)
    path = folder / f"step_{step:08d}.pt"
    temporary = path.with_suffix(_TEMPORARY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(f"*{_TEMPORARY}"):
            left_over.unlink()
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = (isinstance(cause, OSError) and cause.strerror) or str(error).splitlines()[0]
        raise OSError(f"cannot write checkpoint {path} ({reason}); free some space or choose another output folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    older = [checkpoint for checkpoint in _checkpoints(folder) if checkpoint != path]
    for checkpoint in older[: max(0, len(older) - keep + 1)]:
        checkpoint.unlink()
    return path


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step, or None if there is none."""
    return max(_checkpoints(Path(folder)), default=None)


def load_checkpoint(path: str | Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Args:
        path: the file.
        mapped: leave tensors in the file until they are used, and then only what is used.

    Raises:
        ValueError: the file is missing, damaged or not one of ours; names an earlier checkpoint to use instead, if there is one.
    """
    path = Path(path)
    try:
        # torch reads damaged numbers without noticing; the archive holds a checksum of each entry.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} fails its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        return state
    except (OSError, EOFError, RuntimeError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        earlier = max((checkpoint for checkpoint in _checkpoints(path.parent) if checkpoint < path), default=None)
        remedy = f"use {earlier}" if earlier else "start the run anew"
        raise ValueError(f"checkpoint {path} cannot be loaded ({str(error).splitlines()[0]}); {remedy}") from error


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_" + "[0-9]" * 8 + ".pt"))


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
