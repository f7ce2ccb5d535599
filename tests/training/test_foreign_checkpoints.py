"""Checkpoints from elsewhere: no code in them is run, and no file outside of them is read."""

from __future__ import annotations

import json
import pickle
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from comera_rec.training.checkpoint import open_checkpoint


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings(action="ignore"):  # about having only one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def record_of(metadata: bytes) -> str:
    """A checkpoint's record whose checksums fit its description of tensors."""
    checksums = {"record_checksum": zlib.crc32(json.dumps({}).encode()), "checksums": {".metadata": zlib.crc32(metadata)}}
    return json.dumps({"format": 2, "record": {}, **checksums})


def test_metadata_that_names_code_runs_nothing(tmp_path: Path) -> None:
    folder, made = write(tmp_path / "step_00000001", {"weight": torch.ones(2)}), tmp_path / "made"
    metadata = pickle.dumps(Touch(made))
    (folder / ".metadata").write_bytes(metadata)
    (folder / "record.json").write_text(record_of(metadata))
    with pytest.raises(ValueError, match=r"cannot be loaded \(its \.metadata names .*, which describes no tensor\)"):
        open_checkpoint(folder)
    assert not made.exists()
    pickle.loads(metadata)
    assert made.exists(), "the test's own file does what it should"


def crafted(folder: Path, change: Callable[[Metadata], object], state: dict[str, Any] | None = None) -> Path:
    """Change a checkpoint's description of its tensors, with checksums that fit."""
    write(folder, state or {"weight": torch.ones(2, 3)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    content = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content)
    (folder / "record.json").write_text(record_of(content))
    return folder


def place(metadata: Metadata, **values: object) -> None:
    (info,) = metadata.storage_data.values()
    vars(info).update(values)


def describe(metadata: Metadata, size: list[int], chunk: list[int] | None = None) -> None:
    entry = metadata.state_dict_metadata["weight"]
    entry.size = torch.Size(size)
    if chunk:
        entry.chunks[0].sizes = torch.Size(chunk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: place(metadata, relative_path="../secret"), r"it names \.\./secret, which is not in its folder"),
        (lambda metadata: place(metadata, relative_path="/etc/hostname"), "it names /etc/hostname, which is not in its folder"),
        (lambda metadata: place(metadata, relative_path=".."), r"it names \.\., which is not in its folder"),
        (lambda metadata: place(metadata, offset=-1), "bytes that __0_0.distcp lacks"),
        (lambda metadata: place(metadata, length=2**62), f"names {2**62} bytes that __0_0.distcp lacks"),
        (lambda metadata: place(metadata, length="2"), "not supported between|unsupported operand|can only concatenate"),
        (lambda metadata: describe(metadata, [2**62, 4]), "don't hold"),
        (lambda metadata: describe(metadata, [2**62, 4], [2**62, 4]), "don't hold"),
        (lambda metadata: describe(metadata, [3, 2]), "don't hold"),
        (lambda metadata: describe(metadata, [-2, -3], [-2, -3]), "don't hold"),
        (lambda metadata: describe(metadata, [6]), r"is (longer|shorter) than"),
        (lambda metadata: setattr(metadata, "storage_data", None), "no attribute"),
    ],
)
def test_a_crafted_description_is_refused_in_one_line(change: Callable[[Metadata], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = crafted(tmp_path / "step_00000001", change)
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(folder)
    assert "\n" not in str(raised.value)


def test_a_damaged_tensor_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = crafted(tmp_path / "step_00000001", lambda metadata: place(metadata, offset=8, length=100))
    with pytest.raises(ValueError, match=r"step_00000001 cannot be loaded \(.+\): remove it"):
        open_checkpoint(folder).read(["weight"])


def test_an_object_under_the_name_of_a_tensor_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = crafted(tmp_path / "step_00000001", lambda metadata: None, {"weight": Touch(made)})
    with pytest.raises(ValueError, match=r"its \.metadata names .*BytesStorageMetadata, which describes no tensor"):
        open_checkpoint(folder)
    assert not made.exists()
