"""A reader of torch.distributed.checkpoint folders that executes no code from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

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
        pickle.UnpicklingError: from `read_metadata`, if .metadata names anything but descriptions of tensors.
        OSError: if there is no .metadata.
    """

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the sizes and types of tensors by name; raises as `read_metadata` does."""
        entries = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return sizes, types and files of the saved tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its .metadata holds a {type(metadata).__name__}")
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = {name: e for name, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
