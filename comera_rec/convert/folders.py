"""A reader of torch.distributed.checkpoint folders that executes no code from them."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from data_pipeline.errors import UserError

_DESCRIPTIONS = "torch.distributed.checkpoint."
# What torch writes into .metadata; these only hold or look up values.
_KNOWN = {
    *(
        (f"{_DESCRIPTIONS}metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_DESCRIPTIONS}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    ("collections", "OrderedDict"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _KNOWN
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which describes no tensor")


class TensorReader(dcp.FileSystemReader):
    """torch's reader, restricted to tensors: a folder from elsewhere may contain pickled objects, which are ignored.

    Raises:
        ValueError: from `read_metadata`, if .metadata describes tensors outside of the folder's files, or larger than these.
        pickle.UnpicklingError: from `read_metadata`, if .metadata names anything but descriptions of tensors.
        OSError: if there is no .metadata, or a file that it names is missing.
    """

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the sizes and types of tensors by name; raises as `read_metadata` does."""
        entries = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read_into(self, tensors: Mapping[str, Any], *, no_dist: bool) -> None:
        """Fill tensors with what was saved under their names; `no_dist` as for dcp.load.

        Raises:
            ValueError: if nothing was saved under a name, or something of another size.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
                dcp.load(dict(tensors), storage_reader=self, no_dist=no_dist)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise UserError(str(reason).partition("\n")[0] or type(reason).__name__) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return sizes, types and files of the saved tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its .metadata holds a {type(metadata).__name__}")
        entries = metadata.state_dict_metadata
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._require_within_files(tensors, list(metadata.storage_data.values()))
        metadata.state_dict_metadata = dict(tensors)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _require_within_files(self, tensors: Mapping[str, TensorStorageMetadata], places: Sequence[Any]) -> None:
        sizes = {name: file_of(Path(self.path), name).stat().st_size for name in {place.relative_path for place in places}}
        for place in places:
            if not 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]:
                raise UserError(f"its .metadata names {place.length} bytes that {place.relative_path} lacks")
        # Compressed tensors may be larger than their files.
        most = math.inf if any(getattr(place, "transform_descriptors", None) for place in places) else sum(sizes.values())
        for name, entry in tensors.items():
            count = math.prod(entry.size)
            within = all(
                0 <= first <= first + length <= size
                for chunk in entry.chunks
                for first, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            )
            saved = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if not (within and count == saved and count * entry.properties.dtype.itemsize <= most):
                raise UserError(f"its .metadata says that {name} has the size {list(entry.size)}, which its files don't hold")


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file that a checkpoint names; raise ValueError unless it is in the checkpoint's folder."""
    if name == ".." or Path(name).name != name:
        raise UserError(f"it names {name}, which is not in its folder")
    return folder / name
