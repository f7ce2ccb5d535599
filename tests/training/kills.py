"""Kill a run again and again at random moments, and compare its result with that of an unbroken run.

    python -m tests.training.kills --kills 20 --signal KILL --processes 2 --asynchronous

Moments are drawn over start, steps, evaluations and checkpoints. A killed run is restarted until it finishes. Losses, evaluations,
ranks, weights and optimizer state must equal the unbroken run's bit by bit, and SIGTERM must cost no step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comera_rec.testing import CONTEXT
from comera_rec.training import checkpoint
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Trainer
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

OFTEN = [
    "training.eval_every=5", "training.checkpoint_every=3", "training.log_every=1",
    "ranks.early_steps=10", "ranks.late_steps=20", "ranks.target_size=0.5", "ranks.truncate_every=5", "ranks.objective=budget",
    "tables.hot_rows=0.5",
]  # fmt: skip
PHASES = ("starting", "training", "evaluating", "writing a checkpoint")


def run(rank: int, world_size: int, store: str, config_file: Path, overrides: Sequence[str], phase: Any) -> None:
    """Run `comera train` in a process; the first process records its phase."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    sys.stderr = open(f"{store}.{rank}", "w")  # noqa: SIM115
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    if rank == 0:
        for owner, name, number in ((Trainer, "_run", 1), (Trainer, "_evaluate", 2), (checkpoint, "save_checkpoint", 3)):
            setattr(owner, name, noting(getattr(owner, name), phase, number))
    try:
        Trainer(load_config(config_file, overrides)).train()
    except Interrupted as stop:
        os._exit(stop.exit_status)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # a process without its peers may hang in its communication threads


def noting(function: Any, phase: Any, number: int) -> Any:
    """Wrap a function so that it records its phase while it runs."""

    def noted(*args: Any, **options: Any) -> Any:
        before, phase.value = phase.value, number
        try:
            return function(*args, **options)
        finally:
            phase.value = max(before, 1)

    return noted


class Attempt:
    """A run that resumes from its last checkpoint, on several processes."""

    def __init__(self, processes: int, config_file: Path, overrides: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._phase = CONTEXT.Value("i", 0, lock=False)
        arguments = (processes, f"{self._folder.name}/store", config_file, list(overrides), self._phase)
        self._processes: list[BaseProcess] = [CONTEXT.Process(target=run, args=(rank, *arguments)) for rank in range(processes)]
        for process in self._processes:
            process.start()

    @property
    def phase(self) -> str:
        return PHASES[self._phase.value]

    def wait_for_training(self) -> None:
        """Wait until the run is about to take its first step, or has ended."""
        while self.phase == "starting" and self._processes[0].is_alive():
            time.sleep(0.005)

    def finish(self) -> None:
        """Wait for the processes to end, and require that the run is finished."""
        assert self.wait(), "the run does not end"
        printed = "".join(path.read_text() for path in Path(self._folder.name).glob("store.*"))
        self._folder.cleanup()
        assert {process.exitcode for process in self._processes} == {0}, printed

    def wait(self, seconds: float | None = None) -> bool:
        """Wait; return whether all processes end within the time."""
        end = time.monotonic() + (seconds or 600)
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        return not any(process.is_alive() for process in self._processes)

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to all processes, and wait for their end."""
        phase = self.phase
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)
        assert self.wait(300), f"a process survived {number.name}"
        self._folder.cleanup()
        expected = {0, -number, 128 + number}
        if number == signal.SIGKILL or phase == "starting":  # a process may notice that another is gone
            expected.add(1)
        codes = [process.exitcode for process in self._processes]
        assert set(codes) <= expected, f"exit statuses {codes} after {number.name}"


def kill_until_done(
    config_file: Path, overrides: Sequence[str], *, processes: int, number: signal.Signals, kills: int, seed: int = 0
) -> Counter[str]:
    """Train an unbroken run, and one killed at random moments, which must be equal; return how often it was killed in each phase.

    Args:
        config_file: config of the runs.
        overrides: overrides of the config; `output` must not be among them.
        processes: number of processes of each run.
        number: SIGKILL or SIGTERM, sent to all processes at once.
        kills: number of kills, unless the run finishes earlier.
        seed: seed of the moments.

    Raises:
        AssertionError: if the runs differ, or half-written files are left.
    """
    output = Path(load_config(config_file, overrides).output)
    unbroken, broken = (output.with_name(f"{output.name}_{kind}_{number.name}_{processes}") for kind in ("unbroken", "broken"))
    whole = Attempt(processes, config_file, [*overrides, f"output={unbroken}"])
    whole.wait_for_training()
    began = time.monotonic()
    whole.finish()
    seconds = time.monotonic() - began
    moments, killed_at = random.Random(seed), Counter[str]()
    while killed_at.total() < kills and not (broken / "result.json").exists():
        attempt = Attempt(processes, config_file, [*overrides, f"output={broken}"])
        if moments.random() < 0.9:  # otherwise during the start
            attempt.wait_for_training()
        if not attempt.wait(moments.uniform(0, seconds / kills)):
            killed_at[attempt.phase] += 1
            attempt.kill(number)
            if number == signal.SIGTERM:
                require_last_step(broken)
        else:
            attempt.finish()
    Attempt(processes, config_file, [*overrides, f"output={broken}"]).finish()
    compare(unbroken, broken)
    return killed_at


def require_last_step(folder: Path) -> None:
    """Raise AssertionError if the last checkpoint is older than the last step in metrics.jsonl."""
    if (folder / "metrics.jsonl").exists() and (logged := lines(folder, "train")):
        path = latest_checkpoint(folder / "checkpoints")
        assert path is not None, f"step {logged[-1]['step']} is lost: there is no checkpoint"
        assert int(path.stem.removeprefix("step_")) >= logged[-1]["step"], f"step {logged[-1]['step']} is lost, {path} is the last"


def compare(unbroken: Path, broken: Path) -> None:
    """Raise AssertionError if two finished runs differ in anything but times and memory."""
    for kind in ("train", "ranks", "eval"):
        left, right = lines(broken, kind), lines(unbroken, kind)
        assert left == right, f"{kind} differs: {[pair for pair in zip(left, right, strict=False) if pair[0] != pair[1]][:1]}"
    assert (broken / "result.json").exists()
    expected, left_over = tensors(unbroken), tensors(broken)
    assert expected.keys() == left_over.keys()
    differing = [name for name, value in expected.items() if not torch.equal(value, left_over[name])]
    assert not differing, f"tensors differ: {differing[:3]}"
    half = [path.name for path in (broken / "checkpoints").iterdir() if path.suffix]
    assert not half, f"half-written checkpoints are left: {half}"


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without times and memory."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("step_ms", "memory_mib")} for line in read if line["kind"] == kind]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    opened = open_checkpoint(path)
    return opened.read(sorted(opened.sizes))


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, data = Path(folder, "train.txt"), Path(folder, "data")
        synth(SynthOptions(rows=4000, output=log, seed=1, scale=0.001))
        preprocess(PreprocessOptions(inputs=(log,), output=data))
        config = {
            "output": f"{folder}/run", "data": {"path": str(data), "batch_size": 128},
            "model": {"embedding_dim": 8, "dense_arch": [32], "over_arch": [32]},
            "tables": {"tt_ranks": 4, "min_rows": 100}, "linears": {"tt_ranks": 4, "min_features": 32},
            "training": {"steps": options.steps},
        }  # fmt: skip
        config_file = Path(folder, "run.json")
        config_file.write_text(json.dumps(config))
        asynchronous = f"checkpoints.asynchronous={str(options.asynchronous).lower()}"
        number = signal.Signals[f"SIG{options.signal}"]
        killed_at = kill_until_done(
            config_file, [*OFTEN, asynchronous], processes=options.processes, number=number, kills=options.kills, seed=options.seed
        )
    counts = ", ".join(f"{count} {phase}" for phase, count in killed_at.most_common())
    print(f"{killed_at.total()} SIG{options.signal} on {options.processes} process(es) ({counts}): equal bit by bit, nothing lost")


if __name__ == "__main__":
    main()
