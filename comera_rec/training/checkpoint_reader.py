"""Reading of checkpoints: torch.distributed.checkpoint's folders, checked for damage, without running code from them."""

from __future__ import annotations

import math
import pickle
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from comera_rec.distributed import WORLD
from data_pipeline.errors import UserError

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


class Checkpoint:
    """A checkpoint that exists and is not damaged. Tensors stay in its files until they are used; loading runs no code from them.

    Attributes:
        record: what was saved beside the tensors.
        sizes: sizes of the whole tensors, by name.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.record = record
        self._path = path
        entries: dict[str, Any] = dict(_Reader(path).read_metadata().state_dict_metadata)
        self._entries = entries
        self.sizes: dict[str, torch.Size] = {name: entry.size for name, entry in entries.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read whole tensors by name, on the CPU; temporary files are mapped for them, so that large ones take no memory."""
        tensors = {name: _mapped(self.sizes[name], self._entries[name].properties.dtype) for name in names}
        self.read_into(tensors)
        return tensors

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Fill tensors (plain ones, DTensors and ShardedTensors) with what was saved under their names.

        Raises:
            ValueError: if there is none of a name and size, or what is read doesn't fit.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
                dcp.load(dict(tensors), storage_reader=_Reader(self._path), no_dist=not WORLD.several)
        except (ValueError, CheckpointException) as error:
            reason = (str(cause_of(error)) or type(cause_of(error)).__name__).splitlines()[0]
            raise UserError(f"checkpoint {self._path} cannot be loaded ({reason}): remove it, or give another") from error


def cause_of(error: BaseException) -> BaseException:
    """Return the error of a process that torch has wrapped in another, or the error itself."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _mapped(size: torch.Size, dtype: torch.dtype) -> Tensor:
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader, restricted to tensors within the folder's files, because a folder may be from elsewhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return sizes, types and files of the saved tensors.

        Raises:
            ValueError: if .metadata describes tensors outside of the folder's files, or larger than these.
            pickle.UnpicklingError: if .metadata names anything but descriptions of tensors.
            OSError: if there is no .metadata, or a file that it names is missing.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        sizes: dict[str, int] = {}
        for place in metadata.storage_data.values():
            name = place.relative_path
            sizes[name] = file_of(Path(self.path), name).stat().st_size
            if not 0 <= place.offset <= place.offset + place.length <= sizes[name]:
                raise UserError(f"its .metadata names {place.length} bytes that {name} lacks")
        for name, entry in metadata.state_dict_metadata.items():
            if not _fits(entry, sum(sizes.values())):
                raise UserError(f"its .metadata says that {name} has the size {list(entry.size)}, which its files don't hold")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _fits(entry: TensorStorageMetadata, most_bytes: int) -> bool:
    """Whether the chunks of a tensor lie within it and fill it, and it isn't too large."""
    within = all(
        0 <= first <= first + length <= size
        for chunk in entry.chunks
        for first, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
    )
    count, saved = math.prod(entry.size), sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    return within and count == saved and count * entry.properties.dtype.itemsize <= most_bytes


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file that a checkpoint names; raise ValueError unless it is in the checkpoint's folder."""
    if name == ".." or Path(name).name != name:
        raise UserError(f"it names {name}, which is not in its folder")
    return folder / name
