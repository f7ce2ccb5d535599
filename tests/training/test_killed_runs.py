"""A run killed again and again at random moments equals an unbroken one, bit by bit, and SIGTERM costs no step.

    KILLS=20 python -m pytest tests/training/test_killed_runs.py        # kills per case

Moments are drawn over start, steps, evaluations and checkpoints. A killed run is restarted until it finishes.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import CONTEXT

from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Trainer
from tests.training.run_folders import RANKS, assert_same_run, lines

KILLS = int(os.environ.get("KILLS", "1"))
OFTEN = [
    *RANKS, "ranks.early_steps=5", "ranks.late_steps=10", "tables.hot_rows=0.5", f"training.steps={20 + 5 * KILLS}",
    "training.eval_every=5", "training.checkpoint_every=3", "training.log_every=1",
]  # fmt: skip


def train(rank: int, world_size: int, store: Path, config_file: Path, overrides: Sequence[str], has_started: Any) -> None:
    """Run `comera train` in a process; the first process tells when it has started to train."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    gc.freeze()
    sys.stderr = store.with_suffix(f".{rank}").open("w")
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    status, run = 0, Trainer._run

    def started(trainer: Trainer) -> None:
        has_started.value = True
        run(trainer)

    Trainer._run = started  # type: ignore[method-assign]
    try:
        Trainer(load_config(config_file, overrides)).train()
    except Interrupted as stop:
        status = stop.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # a process without its peers may hang in its communication threads


class Attempt:
    """A run on several processes, which resumes from its last checkpoint."""

    def __init__(self, store: Path, processes: int, config_file: Path, overrides: Sequence[str]) -> None:
        self._store, self._has_started = store, CONTEXT.Value("b", False, lock=False)
        arguments = (processes, store, config_file, overrides, self._has_started)
        self._processes = [CONTEXT.Process(target=train, args=(rank, *arguments)) for rank in range(processes)]
        for process in self._processes:
            process.start()

    def wait_for_training(self) -> None:
        """Wait until the run is about to take its first step, or has ended."""
        while not self._has_started.value and self._processes[0].is_alive():
            time.sleep(0.005)

    def ends(self, seconds: float) -> bool:
        """Wait; return whether all processes end within the time."""
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        return not any(process.is_alive() for process in self._processes)

    def require_end(self, *statuses: int) -> None:
        """Wait for the processes to end, with one of the statuses."""
        assert self.ends(300), "a process doesn't end"
        printed = "".join(path.read_text() for path in self._store.parent.glob(f"{self._store.name}.*"))
        assert {process.exitcode for process in self._processes} <= set(statuses), printed

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to all processes, and wait for their end."""
        has_started = self._has_started.value
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)
        # A process may notice that another is gone.
        self.require_end(0, -number, 128 + number, *([1] if number == signal.SIGKILL or not has_started else []))


@pytest.mark.distributed
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGKILL)])
def test_killed_runs_equal_unbroken_ones(config_file: Path, tmp_path: Path, processes: int, number: signal.Signals) -> None:
    whole, broken, moments, killed = tmp_path / "whole", tmp_path / "broken", random.Random(0), 0
    unbroken = Attempt(tmp_path / "store", processes, config_file, [*OFTEN, f"output={whole}"])
    unbroken.wait_for_training()
    began = time.monotonic()
    unbroken.require_end(0)
    seconds = time.monotonic() - began
    while killed < KILLS and not (broken / "result.json").exists():
        attempt = Attempt(tmp_path / f"store_{killed}", processes, config_file, [*OFTEN, f"output={broken}"])
        if moments.random() < 0.9:  # otherwise during the start
            attempt.wait_for_training()
        if attempt.ends(moments.uniform(0, seconds / KILLS)):
            attempt.require_end(0)
        else:
            attempt.kill(number)
            killed += 1
            if number == signal.SIGTERM:
                require_last_step(broken)
    Attempt(tmp_path / "last", processes, config_file, [*OFTEN, f"output={broken}"]).require_end(0)
    assert_same_run(broken, whole)


def require_last_step(folder: Path) -> None:
    """Require the last step in metrics.jsonl to be in the last checkpoint."""
    if (folder / "metrics.jsonl").exists() and (logged := lines(folder, "train")):
        path = latest_checkpoint(folder / "checkpoints")
        assert path is not None, f"step {logged[-1]['step']} is lost: there is no checkpoint"
        assert int(path.name.removeprefix("step_")) >= logged[-1]["step"], f"step {logged[-1]['step']} is lost, {path} is the last"
