"""Runs of earlier versions: their checkpoints are read, and they resume with the batches that would have followed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_rec.testing import run as run_processes
from comera_rec.training import trainer as trainer_module
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.runs import load_run
from comera_rec.training.trainer import Trainer

pytestmark = pytest.mark.distributed

# A process of format 1 had one reader, with a buffer as large as those of all readers together are now.
BUFFER = 512


def train(rank: int, config_file: Path, overrides: list[str], readers: int = 8) -> None:
    trainer_module._READERS = readers
    Trainer(load_config(config_file, overrides)).train()


def train_on(processes: int, *arguments: Any) -> None:
    if processes == 1:
        train(0, *arguments)
    else:
        run_processes(processes, train, *arguments)


def write_as_format_1(folder: Path, processes: int) -> Path:
    """Rewrite a run's last checkpoint in the form of comera-rec 0.1; return its path."""
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    checkpoint = open_checkpoint(path)
    record: dict[str, Any] = {k: v for k, v in checkpoint.record.items() if k not in ("data", "evaluated", "best")}
    for section in (record["config"]["data"], record["batches"]):
        section["shuffle_rows"] = BUFFER // processes
    del record["config"]["checkpoints"], record["config"]["training"]["pipeline"]
    record["batches"]["world_size"] = record["batches"].pop("readers")
    record["batches"]["batch_size"] //= processes
    if processes == 1:
        tensors = checkpoint.read(sorted(checkpoint.sizes))
        tensors = {name: value[:, 0] if ".rank_" in name and value.dim() == 2 else value for name, value in tensors.items()}
        torch.save({"record": record, "tensors": tensors}, path.with_suffix(".pt"))
        shutil.rmtree(path)
        return path.with_suffix(".pt")
    saved = json.loads((path / "record.json").read_text())
    (path / "record.json").write_text(json.dumps({"record": record, "checksums": saved["checksums"]}))
    return path


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_of_format_1_resume(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(trainer_module, "_READERS", 8)  # as `train` sets it
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = ["training.log_every=1", f"data.shuffle_rows={BUFFER}", "optimizer.name=adagrad"]
    train_on(processes, config_file, [*settings, f"output={whole}"], processes)
    train_on(processes, config_file, [*settings, f"output={part}", "training.steps=6"], processes)
    old = write_as_format_1(part, processes)
    model, _, _ = load_run(part)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert old.is_dir() == (processes == 2), "a file becomes a folder"
    train_on(processes, config_file, [*settings, f"output={part}"])
    assert losses(part) == losses(whole)
