"""Checkpoints are complete or absent, damage is named, those from elsewhere run no code; tables and tensors in their own memory."""

import json
import os
import pickle
import resource
import shutil
import warnings
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run as run_processes
from refusals import refuse
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint, save_checkpoint
from comera_rec.training.memory import PeakMemory
from comera_rec.training.model import fuse_dense_tables_
from comera_rec.training.placement import host_memory

FORMAT = 2
WEIGHTS = {"model/weight": torch.ones(3)}
CPU = torch.device("cpu")


def state() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return {"step": 7, "history": [{"size": None}]}, {"model/weight": torch.ones(100, 100)}


def save(folder: Path, step: int, *state: dict[str, Any], **options: Any) -> Path:
    """Write a checkpoint; return its path."""
    save_checkpoint(folder, step, *state, **options)
    return folder / f"step_{step:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_parts_of_larger_memory_copies_none(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = {f"table_{k}": part for k, part in enumerate(torch.ones(8, 5_000_000, dtype=dtype))}
    save(tmp_path, 1, {}, {"warm": torch.ones(8, 8)[0]})
    memory = PeakMemory(torch.device("cpu"))
    saved = open_checkpoint(save(tmp_path, 2, state()[0], parts))
    assert memory.highest < parts["table_0"].nbytes / 2**20
    assert saved.record == state()[0]
    assert all(torch.equal(part, parts[name]) for name, part in saved.read([*parts]).items())


def test_keeps_the_newest_and_always_the_one_just_written(tmp_path: Path) -> None:
    for step in (5, 10, 1000, 900):
        save(tmp_path, step, *state(), keep=2)
    assert names(tmp_path) == ["step_00000900", "step_00001000"]
    save(tmp_path, 20, *state(), keep=1)
    assert names(tmp_path) == ["step_00000020"]
    save(tmp_path, 30, *state(), keep=1, kept_step=20)
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_the_record_of_a_step_is_replaced_and_its_tensors_stay(tmp_path: Path) -> None:
    path = save(tmp_path, 10, *state())
    before = (path / "__0_0.distcp").stat().st_mtime_ns
    save(tmp_path, 10, {"step": 10, "evaluated": 10}, state()[1])
    assert open_checkpoint(path).record == {"step": 10, "evaluated": 10}
    assert (path / "__0_0.distcp").stat().st_mtime_ns == before


def test_only_finished_checkpoints_are_the_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "step_00000009.partial").mkdir()
    (tmp_path / "step_best").touch()
    assert latest_checkpoint(tmp_path) is None
    for step in (20, 10):
        save(tmp_path, step, *state())
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000020"


def test_a_full_disk_keeps_earlier_checkpoints(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    large = open_checkpoint(save(tmp_path / "large", 10, *state()))
    save(tmp_path, 10, {"small": 1}, {}, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    with pytest.raises(OSError, match=r"^cannot write checkpoint .*step_00000020 \(File too large\); free some space or"):
        save(tmp_path, 20, *state(), keep=1)
    assert names(tmp_path) == ["large", "step_00000010"]
    refuse(r"^no 40,000 bytes for a tensor in .* \(File too large\): set TMPDIR to", large.read, ["model/weight"])
    assert open_checkpoint(tmp_path / "step_00000010").record == {"small": 1}


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, lambda content: content[:-100], lambda content: b"", lambda content: b"text"],
    ids=["bit", "end", "empty", "text"],
)
def test_a_damaged_checkpoint_is_named_with_the_one_to_use(tmp_path: Path, damage: Any, file: str) -> None:
    earlier = save(tmp_path, 10, *state())
    latest = save(tmp_path, 20, *state())
    path = latest / file
    path.write_bytes(damage(path.read_bytes()))
    refuse(rf"^checkpoint {latest} cannot be loaded \(.*\): remove it to resume from {earlier.name}$", open_checkpoint, latest)
    shutil.rmtree(earlier)
    refuse(r": remove it to start the run anew$", open_checkpoint, latest)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 11, {"step": 11}, {})
    text = (path / "record.json").read_text()
    (path / "record.json").write_text(text.replace('"step": 11', '"step": 12'))
    refuse(r"cannot be loaded \(record\.json fails its checksum\)", open_checkpoint, path)
    (path / "record.json").write_text(json.dumps(json.loads(text) | {"format": FORMAT + 1}))
    refuse(rf"\(it is of format {FORMAT + 1}, and this version reads format {FORMAT}\): use the version of", open_checkpoint, path)
    refuse(r"cannot be loaded \(.*No such file", open_checkpoint, tmp_path / "step_00000010")
    whole = {"format": FORMAT, "record": {}, "checksums": {}}
    for text in ("[]", "no JSON", json.dumps({"format": FORMAT}), *(json.dumps(whole | {name: None}) for name in whole)):
        (tmp_path / "step_00000010").mkdir(exist_ok=True)
        (tmp_path / "step_00000010" / "record.json").write_text(text)
        refuse(r"cannot be loaded \(", open_checkpoint, tmp_path / "step_00000010")


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def crafted(folder: Path, state: dict[str, Any], change: Callable[[Any], Any]) -> Path:
    """Write a checkpoint whose description of tensors was changed; its checksums fit."""
    with warnings.catch_warnings(action="ignore"):  # about having only one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = pickle.dumps(change(metadata) or metadata)
    (folder / ".metadata").write_bytes(content)
    record = {"format": FORMAT, "record": {}, "record_checksum": zlib.crc32(b"{}"), "checksums": {".metadata": zlib.crc32(content)}}
    (folder / "record.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_checkpoint_from_elsewhere_runs_no_code(is_tensor: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    state = {"weight": Touch(made) if is_tensor else torch.ones(2)}
    folder = crafted(tmp_path / "step_00000001", state, lambda metadata: None if is_tensor else Touch(made))
    refuse(r"cannot be loaded \(its \.metadata names .*, which describes no tensor\)", open_checkpoint, folder)
    assert not made.exists()


class Getattr:
    """Is pickled as an attribute of an object, which may be a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.Size, "numel")


def test_enums_of_the_first_releases_of_python_3_11_are_read(tmp_path: Path) -> None:
    """They are pickled as attributes of their classes."""
    with patch.object(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))):
        folder = crafted(tmp_path / "step_00000001", {"weight": torch.arange(2.0)}, lambda metadata: None)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert open_checkpoint(folder).read(["weight"])["weight"].tolist() == [0, 1]
    other = crafted(tmp_path / "step_00000002", WEIGHTS, lambda metadata: Getattr())
    refuse(r"cannot be loaded \(its \.metadata names .*, which describes no tensor\)", open_checkpoint, other)


def place(metadata: Metadata, **values: object) -> None:
    (info,) = metadata.storage_data.values()
    vars(info).update(values)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".."])
def test_files_outside_its_folder_and_damaged_tensors_are_refused(name: str, tmp_path: Path) -> None:
    state = {"weight": torch.ones(2, 3)}
    folder = crafted(tmp_path / "step_00000001", state, lambda metadata: place(metadata, relative_path=name))
    refuse(f"it names {name}, which is not in its folder", open_checkpoint, folder)
    damaged = crafted(tmp_path / "step_00000002", state, lambda metadata: place(metadata, offset=8, length=100))
    refuse(r"step_00000002 cannot be loaded \(.+\): remove it", open_checkpoint(damaged).read, ["weight"])


def try_to_save(folder: Path, step: int) -> str:
    try:
        save(folder, step, {"step": step, "again": True}, WEIGHTS)
    except OSError as error:
        return str(error)
    return "saved"


def fail_in_every_way(rank: int, folder: Path) -> list[str]:
    save(folder, 4, {"step": 4}, WEIGHTS)
    (folder / "file").touch()
    messages = [try_to_save(folder / "file" / "checkpoints", 5)]
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with patch.object(Path, "rename", rename if rank else fail):  # when the new checkpoint has all but its name
        messages.append(try_to_save(folder, 8))
    kept = latest_checkpoint(folder)
    messages.append(str(open_checkpoint(kept).record))
    dist.barrier()
    messages += [try_to_save(folder, 4), str(open_checkpoint(folder / "step_00000004").record)]
    return messages


@pytest.mark.distributed
def test_all_processes_raise_a_write_error_and_nothing_is_lost(tmp_path: Path) -> None:
    first, second = run_processes(2, fail_in_every_way, tmp_path)
    assert first == second
    no_folder, no_space, kept, again, record = first
    assert no_folder.startswith("cannot write checkpoint")
    assert "Not a directory" in no_folder
    assert "No space left on device" in no_space
    assert kept == "{'step': 4}"
    assert (again, record) == ("saved", "{'step': 4, 'again': True}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step_00000004"]


def collection(rows: int) -> nn.Sequential:
    tables = [EmbeddingBagConfig(name="large", num_embeddings=rows, embedding_dim=64, feature_names=["large"])]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


def test_tables_on_the_meta_device_are_initialized_in_place() -> None:
    fuse_dense_tables_(collection(9), 0.1, CPU)  # loads what the first call needs
    model, memory = collection(500_000), PeakMemory(CPU)
    fuse_dense_tables_(model, 0.1, CPU)
    (weight,) = model.state_dict().values()
    assert memory.highest < 1.4 * weight.nbytes / 2**20
    if os.access("/proc/self/clear_refs", os.W_OK):  # peaks can be reset
        assert memory.highest > 0.9 * weight.nbytes / 2**20
        torch.ones(200 << 18).sum()
        assert memory.take() - memory.take() > 150, "a peak is that of its section"
    bound = 500_000**-0.5  # of a uniform distribution
    assert 0.999 * bound < weight.abs().max() <= bound
    assert abs(weight.std() * 3**0.5 / bound - 1) < 0.01


def test_a_container_limits_the_memory_of_its_host(tmp_path: Path) -> None:
    unlimited, limit = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    unlimited.write_text("max\n")
    whole = host_memory([unlimited, tmp_path / "missing"])
    assert whole > 1 << 28
    limit.write_text(f"{whole // 2}\n")
    assert host_memory([unlimited, limit]) == whole // 2
