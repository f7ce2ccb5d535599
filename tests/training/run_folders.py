"""What runs wrote, and comparisons of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_rec.cli.main import main
from comera_rec.training.checkpoint import checkpoint_at, latest_checkpoint, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer

RANKS = ["ranks.early_steps=4", "ranks.late_steps=6", "ranks.target_size=0.5", "ranks.truncate_every=2", "ranks.objective=budget"]
DENSE = ["tables.format=dense", "linears.format=dense"]


def call(*arguments: object) -> int:
    """Run the command line; return its exit status."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def run(config_file: Path, *overrides: str) -> tuple[Trainer, dict[str, Any]]:
    """Train a run; return its trainer and result."""
    trainer = Trainer(load_config(config_file, overrides))
    return trainer, trainer.train()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without times and memory."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("step_ms", "memory_mib")} for line in read if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """The mean losses of the logged intervals."""
    return [line["loss"] for line in lines(folder, "train")]


def validation(folder: Path) -> dict[int, float]:
    """NE on the validation split by step."""
    return {line["step"]: line["ne"] for line in lines(folder, "eval") if line["split"] == "val"}


def tensors(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, or of that of a step."""
    checkpoints = folder / "checkpoints"
    path = latest_checkpoint(checkpoints) if step is None else checkpoint_at(checkpoints, step)
    checkpoint = open_checkpoint(path)
    return checkpoint.read(sorted(checkpoint.sizes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint."""
    return {name.removeprefix("model/"): value for name, value in tensors(folder).items() if name.startswith("model/")}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Require the same names and, within the tolerance, the same values."""
    torch.testing.assert_close(dict(left), right, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_run(left: Path, right: Path) -> None:
    """Require equal losses, ranks, evaluations, weights and optimizer state, bit by bit."""
    for kind in ("train", "ranks", "eval"):
        assert lines(left, kind) == lines(right, kind), kind
    assert_close(tensors(left), tensors(right))
    assert not [path.name for path in (left / "checkpoints").iterdir() if path.suffix], "half-written checkpoints are left"
