"""Checkpoints of several processes when the one that writes for all fails: all processes learn of it, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comera_rec.testing import run as run_processes
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint
from tests.training.run_folders import save_checkpoint

pytestmark = pytest.mark.distributed

WEIGHTS = {"model/weight": torch.ones(3)}


def try_to_save(folder: Path, step: int) -> str:
    try:
        save_checkpoint(folder, step, {"step": step, "again": True}, WEIGHTS)
    except OSError as error:
        return str(error)
    return "saved"


def fail_in_every_way(rank: int, folder: Path) -> list[str]:
    save_checkpoint(folder, 4, {"step": 4}, WEIGHTS)
    (folder / "file").touch()
    messages = [try_to_save(folder / "file" / "checkpoints", 5)]
    rename = Path.rename
    if rank == 0:  # when the new checkpoint is complete but has its temporary name

        def fail(path: Path, target: Path) -> Path:
            if path.suffix == ".partial":
                raise OSError(28, "No space left on device")
            return rename(path, target)

        Path.rename = fail  # type: ignore[method-assign, assignment]
    messages.append(try_to_save(folder, 8))
    Path.rename = rename  # type: ignore[method-assign]
    kept = latest_checkpoint(folder)
    assert kept is not None
    messages.append(str(open_checkpoint(kept).record))
    dist.barrier()
    messages += [try_to_save(folder, 4), str(open_checkpoint(folder / "step_00000004").record)]
    return messages


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
