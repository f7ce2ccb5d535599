"""Checkpoints that are either whole or not there: written beside, synced to disk, then renamed.

    checkpoints/step_00001000.pt     of one process: a file
    checkpoints/step_00002000/       of several: torch.distributed.checkpoint's files, a part from each process, and record.json

Both hold a record (numbers, strings, lists and dictionaries of them, as JSON has them) and tensors by name. What several processes
saved, one process or another number of them loads, and the other way round.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from comera_rec.convert.folders import TensorReader
from comera_rec.rank.tt_modules import on_several_processes
from comera_rec.training.processes import on_first

_TEMPORARY = ".partial"
_REPLACED = ".replaced"  # of a checkpoint whose successor of the same step is taking its name
_RECORD = "record.json"


class Checkpoint(Protocol):
    """A checkpoint that was found and is not damaged.

    Attributes:
        record: what was saved beside the tensors.
        sizes: of the whole tensors, by name.
    """

    record: dict[str, Any]
    sizes: dict[str, torch.Size]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Whole tensors by name, on the CPU."""

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Fill tensors (plain ones, DTensors and ShardedTensors) with what was saved under their names."""


def save_checkpoint(
    folder: str | Path,
    step: int,
    record: dict[str, Any],
    tensors: Mapping[str, Any],
    *,
    keep: int = 2,
    kept_step: int | None = None,
) -> Path:
    """Write the state of a step, then delete all but the newest `keep` checkpoints and whatever a killed process left half-written.

    Where there are several processes, each calls this; the first one's record is kept, and every tensor that any of them gives.

    Args:
        folder: where the checkpoints lie; made if need be. One run writes to it.
        step: optimizer steps taken.
        record: numbers, strings, and dictionaries and lists of them.
        tensors: by name; parts of tensors that are spread over processes are DTensors or ShardedTensors.
        keep: how many checkpoints stay.
        kept_step: whose checkpoint stays beside them.

    Raises:
        ValueError: keep or step out of range.
        OSError: the file cannot be written, for want of space or permission; earlier checkpoints are then untouched.

    Returns:
        The checkpoint's path.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
    if not 0 <= step <= 99_999_999:
        raise ValueError(f"step must be in 0..99999999, for file names that sort, got {step}")
    folder = Path(folder)
    several = on_several_processes()
    path = folder / (_name(step) + ("" if several else ".pt"))
    try:
        if several:
            _write_folder(path, record, tensors)
        else:
            _write_file(path, record, tensors)
        on_first(lambda: _remove_older(path, keep, kept_step))
    except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a failed write into a RuntimeError
        raise OSError(
            f"cannot write checkpoint {path} ({_reason(error)}); free some space or choose another output folder"
        ) from error
    return path


def _remove_older(path: Path, keep: int, kept_step: int | None) -> None:
    older = [checkpoint for checkpoint in _checkpoints(path.parent) if checkpoint != path]
    for number, checkpoint in enumerate(older):
        superseded = number < len(older) - keep + 1 and checkpoint.stem != _name(kept_step)
        if superseded or checkpoint.stem == path.stem:  # of another number of processes
            _remove(checkpoint)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step, or None if there is none."""
    return max(_checkpoints(Path(folder)), default=None, key=_step)


def checkpoint_at(folder: str | Path, step: int | None) -> Path | None:
    """The checkpoint of a step, or None if there is none."""
    return next((path for path in _checkpoints(Path(folder)) if path.stem == _name(step)), None)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check a checkpoint for damage and open it; where there are several processes, each calls this.

    Raises:
        ValueError: the checkpoint is missing, damaged or not one of ours; names an earlier one to use instead, if there is one.
    """
    path = Path(path)
    try:
        return _Folder(path) if path.is_dir() else _File(path)
    except (OSError, EOFError, RuntimeError, TypeError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        earlier = max((c for c in _checkpoints(path.parent) if _step(c) < _step(path)), default=None, key=_step)
        remedy = f"use {earlier}" if earlier else "start the run anew"
        raise ValueError(f"checkpoint {path} cannot be loaded ({str(error).splitlines()[0]}); {remedy}") from error


class _File:
    """Its tensors stay in the file until they are used. Loading runs no code from it."""

    def __init__(self, path: Path) -> None:
        # torch reads damaged numbers without noticing; the archive holds a checksum of each entry.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} fails its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not (isinstance(state, dict) and state.keys() == {"record", "tensors"}):
            raise TypeError("it holds something else")
        self.path = path
        self.record: dict[str, Any] = state["record"]
        self._tensors: dict[str, Tensor] = state["tensors"]
        self.sizes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        if on_several_processes():
            with self._as_folder() as folder:
                dcp.load(dict(tensors), checkpoint_id=folder)
            return
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self._tensors[name])

    @contextlib.contextmanager
    def _as_folder(self) -> Iterator[str]:
        """For a while in the form that knows how to divide tensors among processes."""

        def copy() -> str:
            name = tempfile.mkdtemp(dir=self.path.parent, suffix=_TEMPORARY)
            _quietly(dcp.save, self._tensors, storage_writer=dcp.FileSystemWriter(name))
            return name

        name = on_first(copy)
        try:
            yield name
        finally:
            dist.barrier()
            on_first(lambda: _remove(Path(name)))


class _Folder:
    """Its tensors stay in the files until they are used. Loading runs no code from them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        saved = json.loads((path / _RECORD).read_text())
        self.record: dict[str, Any] = saved["record"]
        for number, (name, checksum) in enumerate(sorted(saved["checksums"].items())):
            mine = not on_several_processes() or number % dist.get_world_size() == dist.get_rank()
            if mine and _checksum(path / name) != checksum:
                raise OSError(f"{name} fails its checksum")
        entries = TensorReader(path).tensors()
        self.sizes = {name: entry.size for name, entry in entries.items()}
        self._dtypes = {name: entry.properties.dtype for name, entry in entries.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        tensors = {name: torch.empty(self.sizes[name], dtype=self._dtypes[name]) for name in names}
        self.read_into(tensors)
        return tensors

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        if on_several_processes():
            dcp.load(dict(tensors), storage_reader=TensorReader(self._path))
        else:
            _quietly(dcp.load, tensors, storage_reader=TensorReader(self._path))


def _write_file(path: Path, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    temporary = path.with_suffix(_TEMPORARY)
    _clear(path.parent)
    try:
        with temporary.open("wb") as file:
            torch.save({"record": record, "tensors": dict(tensors)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_folder(path: Path, record: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(_TEMPORARY)
    on_first(lambda: _clear(path.parent))
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(temporary))  # syncs its files; all raise what one does
    mine = {file.name: _checksum(file) for file in temporary.glob(f"__{dist.get_rank()}_*")}
    checksums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, mine)

    def finish() -> None:
        merged = {name: checksum for each in checksums for name, checksum in each.items()}
        merged[".metadata"] = _checksum(temporary / ".metadata")
        with (temporary / _RECORD).open("w") as file:
            json.dump({"record": record, "checksums": merged}, file)
            file.flush()
            os.fsync(file.fileno())
        aside = path.with_suffix(_REPLACED)
        if path.exists():
            path.rename(aside)
        temporary.rename(path)
        _sync_folder(path.parent)
        if aside.exists():
            _remove(aside)

    on_first(finish)


def _quietly(function: Any, tensors: Mapping[str, Any], **where: Any) -> None:
    """`torch.distributed.checkpoint` by this process alone, which it remarks upon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(dict(tensors), no_dist=True, **where)


def _clear(folder: Path) -> None:
    """Remove what a killed process left half-written, and give back their names to checkpoints that it was replacing."""
    folder.mkdir(parents=True, exist_ok=True)
    for aside in folder.glob(f"*{_REPLACED}"):
        if aside.with_suffix("").exists():
            _remove(aside)
        else:
            aside.rename(aside.with_suffix(""))
    for left_over in folder.glob(f"*{_TEMPORARY}"):
        _remove(left_over)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Under another name first, so that a run that is killed now leaves no half of a checkpoint.
        doomed = path.with_suffix(f"{path.suffix}.old{_TEMPORARY}") if path.suffix != _TEMPORARY else path
        shutil.rmtree(path.rename(doomed))
    else:
        path.unlink()


def _checkpoints(folder: Path) -> list[Path]:
    digits = "step_" + "[0-9]" * 8
    aside = [path for path in folder.glob(digits + _REPLACED) if not path.with_suffix("").exists()]
    return sorted([*aside, *folder.glob(f"{digits}.pt"), *folder.glob(digits)], key=_step)


def _step(path: Path) -> str:
    return path.stem


def _name(step: int | None) -> str:
    return "" if step is None else f"step_{step:08d}"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of one or several processes
        error = next(iter(error.failures.values()))[0]
    cause = error if isinstance(error, OSError) else error.__context__
    return (isinstance(cause, OSError) and cause.strerror) or str(error).splitlines()[0]


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
