"""Two processes stop, clip and choose the best checkpoint together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comera_rec.data import Batch
from comera_rec.testing import run as run_processes
from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.metrics import BinaryMetrics
from comera_rec.training.step import clip_gradients_, gradient_norm, gradient_shares
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Trainer

pytestmark = pytest.mark.distributed

OVERSHOOTING = ["training.eval_every=2", "training.keep_best=true", "training.patience=2"]
OVERSHOOTING += ["optimizer.lr_dense=0.3", "optimizer.lr_cores=0.3"]

# Whole gradients; dense tables, which every part updates in backward, stay unchanged.
GRADIENTS = ["training.clip_grad_norm=1e9", "optimizer.lr_tables=1e-9"]


def terminated(trainer: Trainer, owner: Any, method: str, step: int) -> list[Any]:
    """Train, and send SIGTERM only to this process, in a method at a step; return what stopped it, and the latest checkpoint."""
    original = getattr(owner, method)

    def terminate(self: Any, *args: Any) -> Any:
        if trainer.steps == step and trainer.processes.process_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    setattr(owner, method, terminate)
    try:
        trainer.train()
    except Interrupted as stop:
        kept = latest_checkpoint(trainer.checkpoints)
        return [str(stop).split(" with ")[0], kept and kept.name]
    finally:
        setattr(owner, method, original)
    return ["trained to the end", None]


def use_controls(rank: int, config_file: Path, folder: Path) -> dict[str, Any]:
    def trainer(*overrides: str) -> Trainer:
        return Trainer(load_config(config_file, overrides))

    results: dict[str, Any] = {}
    quiet = ["training.log_every=100", "training.checkpoint_every=0", f"output={folder / 'stopped'}"]
    results["in a step"] = terminated(trainer(*quiet), Trainer, "_step", 4)
    evaluating = [*quiet, "training.eval_every=8", "data.eval_batch_size=50"]
    results["in an evaluation"] = terminated(trainer(*evaluating), BinaryMetrics, "update", 8)
    resumed = trainer(*evaluating)
    results["resumed"] = resumed.train()["steps"]
    best = trainer(*OVERSHOOTING, f"output={folder / 'best'}")
    result = best.train()
    results["best"] = [result["best_step"], result["steps"], best.best]

    clipping = trainer(f"output={folder / 'clipped'}", "training.accumulation=2", *GRADIENTS)
    clipping._resume()
    parts = torch.load(folder / "parts.pt", weights_only=False)
    clipping._step(iter(parts[2 * rank : 2 * rank + 2]))
    shares = gradient_shares(clipping.module)
    results["norm"] = float(gradient_norm(clipping.module, shares))
    clip_gradients_(clipping.module, 0.01, shares)
    results["clipped"] = float(gradient_norm(clipping.module, shares))
    dist.barrier()
    return results


def test_two_processes_act_as_one(config_file: Path, tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'clipped'}", "training.accumulation=4", *GRADIENTS]
    one = Trainer(load_config(config_file, settings))
    one.save()
    parts: list[Batch] = [batch for batch, _ in zip(one.loader, range(4), strict=False)]
    torch.save(parts, tmp_path / "parts.pt")
    one._step(iter(parts))
    norm = float(gradient_norm(one.module, gradient_shares(one.module)))

    first, second = run_processes(2, use_controls, config_file, tmp_path)
    assert first["in a step"] == second["in a step"]
    assert first["in a step"][0] in ("stopped by SIGTERM at step 5", "stopped by SIGTERM at step 6"), (
        "without waiting for a log line"
    )
    assert first["in a step"][1] == f"step_{int(first['in a step'][0][-1]):08d}"
    assert first["in an evaluation"] == second["in an evaluation"] == ["stopped by SIGTERM at step 8", "step_00000008"]
    assert first["resumed"] == second["resumed"] == 12
    assert first["best"] == second["best"]
    assert first["best"][0] < first["best"][1] < 12
    assert first["norm"] == second["norm"] == pytest.approx(norm, rel=1e-4)
    assert first["clipped"] == pytest.approx(min(0.01, norm), rel=1e-3)
