"""Checkpoints that are either complete or absent: written under a temporary name, synced to disk, then renamed.

    checkpoints/step_00001000/      torch.distributed.checkpoint's files, a part from each process
        record.json                 numbers, strings, lists and dictionaries; the format; checksums of the files

Any number of processes can load a checkpoint, whatever number saved it.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import warnings
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from comera_rec.distributed import WORLD, Processes
from comera_rec.training.checkpoint_reader import Checkpoint, cause_of, file_of
from data_pipeline.atomic import replacing, sync
from data_pipeline.errors import UserError

_FORMAT = 2
_TEMPORARY = ".partial"
_RECORD = "record.json"

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # raised on a single process


class _SavePlanner(dcp.DefaultSavePlanner):
    """Hides from the writer that a tensor is a view of larger memory: it would copy the view, and keep the copy to the end."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        if not isinstance(data, Tensor) or not data.is_cpu or not data.is_contiguous():
            return data
        return torch.from_dlpack(data.detach()) if 0 < data.nbytes < data.untyped_storage().nbytes() else data


def _write(path: Path, record: dict[str, Any], tensors: Mapping[str, Any], processes: Processes) -> None:
    temporary = path.with_suffix(_TEMPORARY)
    writer = dcp.FileSystemWriter(temporary)  # syncs its files
    dcp.save(
        dict(tensors), storage_writer=writer, planner=_SavePlanner(), process_group=processes.group, no_dist=not processes.several
    )
    pattern = f"__{processes.process_rank}_*"
    checksums = processes.on_each(lambda: {file.name: _checksum(file) for file in temporary.glob(pattern)})

    def finish() -> None:
        merged = {name: checksum for local in checksums for name, checksum in local.items()}
        _write_record(temporary, record, merged | {".metadata": _checksum(temporary / ".metadata")})
        temporary.rename(path)
        sync(path.parent)  # or a power cut may undo the rename

    processes.on_first(finish)


def _write_record(folder: Path, record: dict[str, Any], checksums: dict[str, int]) -> None:
    saved = {"format": _FORMAT, "record": record, "record_checksum": _json_checksum(record), "checksums": checksums}
    with replacing(folder / _RECORD) as beside:
        beside.write_text(json.dumps(saved))


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. With several processes, each calls the same methods at the same step.

    Args:
        folder: folder of the checkpoints, created if needed; only one run writes to it.
        keep: number of newest checkpoints to keep, at least 1.
        asynchronous: let `save` return as soon as the tensors are copied (in memory, for as long as the write takes); a thread
            writes, in a separate process group. A write that failed shows in `failed`, and is raised by the next `wait` or `save`.
    """

    def __init__(self, folder: Path, *, keep: int = 2, asynchronous: bool = False) -> None:
        self._folder, self._keep = folder, keep
        self._processes = WORLD.separate_group() if asynchronous else WORLD
        self._thread = ThreadPoolExecutor(1, "CheckpointWriter") if asynchronous else None
        self._writing: Future[None] | None = None

    def save(self, step: int, record: dict[str, Any], tensors: Mapping[str, Any], *, kept_step: int | None = None) -> None:
        """Write the state of a step, then delete all but the newest checkpoints and what a killed process left half-written.

        The record of process 0 is saved, and the tensors of all processes. If there is a checkpoint of the step already, its record
        is replaced; its tensors stay, because those of a run follow from the step.

        Args:
            record: numbers, strings, and dictionaries and lists of them.
            tensors: by name; tensors sharded over processes are DTensors or ShardedTensors.
            kept_step: step whose checkpoint is kept, too.

        Raises:
            OSError: on every process, if one of them lacks space or permission to write; earlier checkpoints stay untouched.
        """
        self.wait()
        if self._thread is None:
            self._save(step, record, tensors, kept_step)
        else:
            copies = BlockingAsyncStager().stage(dict(tensors))
            self._writing = self._thread.submit(self._save, step, copy.deepcopy(record), copies, kept_step)

    def _save(self, step: int, record: dict[str, Any], tensors: Mapping[str, Any], kept_step: int | None) -> None:
        path, on_first = self._folder / _name(step), self._processes.on_first
        try:
            on_first(lambda: _clear(path.parent))
            if on_first(path.exists):
                on_first(lambda: _write_record(path, record, json.loads((path / _RECORD).read_text())["checksums"]))
            else:
                _write(path, record, tensors, self._processes)
            on_first(lambda: _remove_older(path, self._keep, kept_step))
        except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a failed write into a RuntimeError
            on_first(lambda: shutil.rmtree(path.with_suffix(_TEMPORARY), ignore_errors=True))
            raise OSError(
                f"cannot write checkpoint {path} ({_reason(error)}); free some space or choose another output folder"
            ) from error

    @property
    def failed(self) -> bool:
        """Whether the current write has failed."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is being written; if the write failed, raise its error, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the highest step, or None if there is none."""
    return next(reversed(_checkpoints(Path(folder))), None)


def checkpoint_at(folder: str | Path, step: int) -> Path | None:
    """Return the checkpoint of a step, or None if there is none."""
    path = Path(folder) / _name(step)
    return path if path.exists() else None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check a checkpoint for damage and open it; with several processes, each calls this.

    Raises:
        ValueError: on every process, if the checkpoint is missing, damaged, of another format or another program's. The message
            names the earlier checkpoint from which the run resumes once this one is removed, if there is one.
    """
    path, remedy = Path(path), ""
    try:
        saved = json.loads((path / _RECORD).read_text())
        if not isinstance(saved["record"], dict):
            raise TypeError(f"{_RECORD} holds no record")
        if saved["format"] != _FORMAT:
            remedy = "use the version of comera-rec that wrote it"
            raise UserError(f"it is of format {saved['format']}, and this version reads format {_FORMAT}")
        if saved["record_checksum"] != _json_checksum(saved["record"]):
            raise UserError(f"{_RECORD} fails its checksum")
        checksums = sorted(saved["checksums"].items())[WORLD.process_rank :: WORLD.size]

        def check() -> None:
            for name, checksum in checksums:
                if _checksum(file_of(path, name)) != checksum:
                    raise OSError(f"{name} fails its checksum")

        WORLD.on_each(check)
        return Checkpoint(path, saved["record"])
    except (
        OSError, EOFError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        earlier = [checkpoint.name for checkpoint in _checkpoints(path.parent) if checkpoint.name < path.name]
        remedy = remedy or (f"remove it to resume from {earlier[-1]}" if earlier else "remove it to start the run anew")
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"checkpoint {path} cannot be loaded ({reason}): {remedy}") from error


def _remove_older(path: Path, keep: int, kept_step: int | None) -> None:
    older = [checkpoint for checkpoint in _checkpoints(path.parent) if checkpoint != path]
    for checkpoint in older[: max(0, len(older) - keep + 1)]:
        if kept_step is None or checkpoint.name != _name(kept_step):
            # Renamed first, so that a run that is killed now leaves no partial checkpoint.
            shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(f".old{_TEMPORARY}")))


def _clear(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"*{_TEMPORARY}"):
        shutil.rmtree(left_over)


def _checkpoints(folder: Path) -> list[Path]:
    """List checkpoints by ascending step."""
    return sorted(folder.glob("step_" + "[0-9]" * 8))


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _json_checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())


def _reason(error: BaseException) -> str:
    error = cause_of(error)
    cause = error if isinstance(error, OSError) else error.__context__
    return (isinstance(cause, OSError) and cause.strerror) or str(error).splitlines()[0]
