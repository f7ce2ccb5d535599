"""Checkpoints that are either complete or absent: written under a temporary name, synced to disk, then renamed.

    checkpoints/step_00001000/      torch.distributed.checkpoint's files, a part from each process
        record.json                 numbers, strings, lists and dictionaries; the format; checksums of the files

Any number of processes can load a checkpoint, whatever number saved it. Loading runs no code from it, as it may be from elsewhere.
"""

import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from comera_rec.distributed import WORLD
from data_pipeline.atomic import replacing, sync
from data_pipeline.errors import UserError

_FORMAT = 2
_TEMPORARY = ".partial"
_REPLACED = "its run has replaced it by a later one, try again"
_RECORD = "record.json"
# What torch writes into .metadata of tensors, by module; these only hold or look up values.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # raised on a single process


class _SavePlanner(dcp.DefaultSavePlanner):
    """Hides from the writer that a tensor is a view of larger memory: it would copy the view, and keep the copy to the end."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        if not isinstance(data, Tensor) or not data.is_cpu or not data.is_contiguous():
            return data
        return torch.from_dlpack(data.detach()) if 0 < data.nbytes < data.untyped_storage().nbytes() else data


def save_checkpoint(
    folder: Path, step: int, record: dict[str, Any], tensors: Mapping[str, Any], *, keep: int = 2, kept_step: int | None = None
) -> None:
    """Write the state of a step, then delete all but the newest checkpoints and what a killed process left half-written.

    With several processes, each calls this at the same step. The record of process 0 is saved, and the tensors of all processes.
    Where there is a checkpoint of the step already, its record is replaced; its tensors stay, because they follow from the step.

    Args:
        folder: folder of the checkpoints, created if needed; only one run writes to it.
        record: numbers, strings, and dictionaries and lists of them.
        tensors: by name; tensors sharded over processes are DTensors or ShardedTensors.
        keep: number of newest checkpoints to keep, at least 1.
        kept_step: step whose checkpoint is kept, too.

    Raises:
        OSError: on every process, if one of them lacks space or permission to write; earlier checkpoints stay untouched.
    """
    path = folder / _name(step)
    try:
        WORLD.on_first(lambda: _clear(folder))
        if WORLD.on_first(path.exists):
            WORLD.on_first(lambda: _write_record(path, record, json.loads((path / _RECORD).read_text())["checksums"]))
        else:
            _write(path, record, tensors)
        WORLD.on_first(lambda: _remove_older(path, keep, kept_step))
    except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a failed write into a RuntimeError
        WORLD.on_first(lambda: shutil.rmtree(path.with_suffix(_TEMPORARY), ignore_errors=True))
        raise OSError(
            f"cannot write checkpoint {path} ({_reason(error)}); free some space or choose another output folder"
        ) from error


def _write(path: Path, record: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(_TEMPORARY)
    writer = dcp.FileSystemWriter(temporary)  # syncs its files
    dcp.save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), no_dist=not WORLD.several)
    pattern = f"__{WORLD.process_rank}_*"
    checksums = WORLD.on_each(lambda: {file.name: _checksum(file) for file in temporary.glob(pattern)})

    def finish() -> None:
        merged = {name: checksum for local in checksums for name, checksum in local.items()}
        _write_record(temporary, record, merged | {".metadata": _checksum(temporary / ".metadata")})
        temporary.rename(path)
        sync(path.parent)  # or a power cut may undo the rename

    WORLD.on_first(finish)


def _write_record(folder: Path, record: dict[str, Any], checksums: dict[str, int]) -> None:
    saved = {"format": _FORMAT, "record": record, "record_checksum": _json_checksum(record), "checksums": checksums}
    with replacing(folder / _RECORD) as beside:
        beside.write_text(json.dumps(saved))


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the highest step, or None if there is none."""
    return next(reversed(_checkpoints(Path(folder))), None)


def checkpoint_at(folder: str | Path, step: int) -> Path | None:
    """Return the checkpoint of a step, or None if there is none."""
    path = Path(folder) / _name(step)
    return path if path.exists() else None


class Checkpoint:
    """A checkpoint that exists and is not damaged. Tensors stay in its files until they are used; loading runs no code from them.

    Attributes:
        record: what was saved beside the tensors.
        sizes: sizes of the whole tensors, by name.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.record = record
        self._path = path
        self._entries: dict[str, Any] = dict(_Reader(path).read_metadata().state_dict_metadata)
        self.sizes: dict[str, torch.Size] = {name: entry.size for name, entry in self._entries.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read whole tensors by name, on the CPU; temporary files are mapped for them, so that large ones take no memory."""
        tensors = {name: _mapped(self.sizes[name], self._entries[name].properties.dtype) for name in names}
        self.read_into(tensors)
        return tensors

    def read_named(self, prefix: str, suffix: str = "") -> dict[str, Tensor]:
        """Read the tensors whose names begin and end so; return them by what is between."""
        names = [name for name in self.sizes if name.startswith(prefix) and name.endswith(suffix)]
        return {name.removeprefix(prefix).removesuffix(suffix): tensor for name, tensor in self.read(names).items()}

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Fill tensors (plain ones, DTensors and ShardedTensors) with what was saved under their names.

        Raises:
            ValueError: if there is none of a name and size, or what is read doesn't fit.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
                dcp.load(dict(tensors), storage_reader=_Reader(self._path), no_dist=not WORLD.several)
        except (ValueError, CheckpointException) as error:
            reason = (str(_cause_of(error)) or type(_cause_of(error)).__name__).splitlines()[0]
            advice = "remove it, or give another" if self._path.exists() else _REPLACED
            raise UserError(f"checkpoint {self._path} cannot be loaded ({reason}): {advice}") from error


def _mapped(size: torch.Size, dtype: torch.dtype) -> Tensor:
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    needed = size.numel() * dtype.itemsize
    try:
        with tempfile.NamedTemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, needed)  # or a write where there is no space ends the process
            return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)
    except OSError as error:
        reason = f"no {needed:,} bytes for a tensor in {tempfile.gettempdir()} ({error.strerror})"
        raise UserError(f"{reason}: set TMPDIR to a larger folder") from error


def _member(kind: type, name: str) -> Enum:
    """Return a member of an enum, as which early releases of Python 3.11 pickle `getattr(kind, name)`."""
    if not issubclass(kind, Enum):
        raise pickle.UnpicklingError(f"its .metadata names {kind.__name__}.{name}, which describes no tensor")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader, which runs no code from a checkpoint, because a folder may be from elsewhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        for place in metadata.storage_data.values():
            _file_of(Path(self.path), place.relative_path)
        return metadata


def _file_of(folder: Path, name: str) -> Path:
    """Return the path of a file that a checkpoint names; raise ValueError unless it is in the checkpoint's folder."""
    if name == ".." or Path(name).name != name:
        raise UserError(f"it names {name}, which is not in its folder")
    return folder / name


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check a checkpoint for damage and open it; with several processes, each calls this.

    Raises:
        ValueError: on every process, if the checkpoint is missing, damaged, of another format or another program's. The message
            names the earlier checkpoint from which the run resumes once this one is removed, if there is one.
    """
    path, remedy = Path(path), ""
    try:
        saved = json.loads((path / _RECORD).read_text())
        if saved["format"] != _FORMAT:
            remedy = "use the version of comera-rec that wrote it"
            raise UserError(f"it is of format {saved['format']}, and this version reads format {_FORMAT}")
        if saved["record_checksum"] != _json_checksum(saved["record"]):
            raise UserError(f"{_RECORD} fails its checksum")
        checksums = sorted(saved["checksums"].items())[WORLD.process_rank :: WORLD.size]

        def check() -> None:
            for name, checksum in checksums:
                if _checksum(_file_of(path, name)) != checksum:
                    raise OSError(f"{name} fails its checksum")

        WORLD.on_each(check)
        return Checkpoint(path, saved["record"])
    except (
        OSError, EOFError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        earlier = [checkpoint.name for checkpoint in _checkpoints(path.parent) if checkpoint.name < path.name]
        remedy = remedy or (f"remove it to resume from {earlier[-1]}" if earlier else "remove it to start the run anew")
        remedy = remedy if path.exists() else _REPLACED
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


def _cause_of(error: BaseException) -> BaseException:
    """Return the error of a process that torch has wrapped in another, or the error itself."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _reason(error: BaseException) -> str:
    error = _cause_of(error)
    cause = error if isinstance(error, OSError) else error.__context__
    return (isinstance(cause, OSError) and cause.strerror) or str(error).splitlines()[0]
