"""Runs on several processes: resumed by another number of processes, killed, stopped.

A run killed again and again at random moments equals an unbroken one, bit by bit, and SIGTERM costs no step. Moments are drawn over
start, steps, evaluations and checkpoints. A killed run is restarted until it finishes.

    KILLS=20 python -m pytest tests/training/test_processes.py -k killed_runs        # kills per case"""

import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import CONTEXT
from processes import run as run_processes
from refusals import refuse
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import LaunchConfig, elastic_launch

from comera_rec.distributed import WORLD
from comera_rec.training import checkpoint
from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.evaluation import BinaryMetrics, evaluate
from comera_rec.training.from_runs import compress_run
from comera_rec.training.model import Schema
from comera_rec.training.runs import load_run, require_fit
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Trainer
from data_pipeline.manifest import read_manifest
from tests.training.run_folders import DENSE, RANKS, assert_close, assert_same_run, call, lines, losses, tensors

pytestmark = pytest.mark.distributed

HOT_ROWS = ["tables.hot_rows=0.5", *RANKS]
EVERY_STEP = ["training.log_every=1"]
CONTROLS = {
    "weight decay": ["optimizer.weight_decay_dense=0.1", "optimizer.weight_decay_cores=0.1", "training.eval_every=4"],
    "weight decay, Adagrad": ["optimizer.name=adagrad", "optimizer.lr_cores=0.02", "optimizer.weight_decay_cores=0.1"],
    "early stopping": [
        "training.eval_every=2", "training.keep_best=true", "training.patience=2", "training.steps=24",
        "optimizer.name=adagrad", "optimizer.lr_dense=0.3", "optimizer.lr_cores=0.02",
    ],
}  # fmt: skip
KILLS = int(os.environ.get("KILLS", "1"))
OFTEN = [
    *RANKS, "ranks.early_steps=5", "ranks.late_steps=10", "tables.hot_rows=0.5", f"training.steps={20 + 5 * KILLS}",
    "training.eval_every=5", "training.checkpoint_every=3", "training.log_every=1",
]  # fmt: skip


def train(rank: int, config_file: Path, *runs: list[str]) -> list[dict[str, Any]]:
    """Train runs one after the other."""
    return [Trainer(load_config(config_file, overrides)).train() for overrides in runs]


def train_on(processes: int, *arguments: Any) -> list[dict[str, Any]]:
    """Train runs on a number of processes, which all have the same results."""
    first, *others = run_processes(processes, train, *arguments) if processes > 1 else [train(0, *arguments)]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(("form", "processes"), [(HOT_ROWS, 1), (HOT_ROWS, 2), (["optimizer.name=adagrad"], 2), (DENSE, 1)])
def test_a_resumed_run_equals_an_unbroken_one(config_file: Path, tmp_path: Path, form: list[str], processes: int) -> None:
    """And it reports what its checkpoint holds."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    once, in_two = ([*form, f"output={folder}"] for folder in (whole, part))
    result, _, resumed, again = train_on(processes, config_file, once, [*in_two, "training.steps=6"], in_two, once)
    assert result == again, "a finished run is left alone"
    assert (result["processes"], len(lines(whole, "eval"))) == (processes, 2)
    for kind in ("train", "ranks"):
        assert lines(part, kind) == lines(whole, kind), kind
    assert lines(part, "eval")[-2:] == lines(whole, "eval")
    same = ("auc", "ne", "logloss", "params", "bytes")
    assert [resumed[key] for key in same] == [result[key] for key in same]
    assert_close(tensors(part), tensors(whole))
    assert any(key.startswith("optimizer/") for key in tensors(whole))
    assert any((whole / "tensorboard").iterdir())

    model, config, _ = load_run(whole)
    assert result["params"] == sum(parameter.numel() for parameter in model.parameters())
    evaluated = evaluate(model, Trainer(config)._batches("test", shuffle=False), torch.device("cpu"))
    assert evaluated["rows"] == result["rows"]
    assert (evaluated["auc"], evaluated["ne"]) == pytest.approx((result["auc"], result["ne"]), rel=1e-5)
    if form is HOT_ROWS:
        history = lines(whole, "ranks")
        assert [history[0]["stage"], history[-1]["stage"]] == ["early", "done"]
        assert 0.97 * history[-1]["target_params"] <= history[-1]["params"] <= history[-1]["target_params"] + 1


@pytest.mark.parametrize(("overrides", "before", "after"), [(DENSE, 1, 2), (HOT_ROWS, 2, 1)])
def test_other_processes_continue_a_run(config_file: Path, tmp_path: Path, overrides: list[str], before: int, after: int) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    in_two = [*EVERY_STEP, *overrides, f"output={part}"]
    train_on(before, config_file, [*EVERY_STEP, *overrides, f"output={whole}"], [*in_two, "training.steps=6"])
    train_on(after, config_file, in_two)
    assert losses(part) == pytest.approx(losses(whole), rel=1e-5)
    assert [line["ranks"] for line in lines(part, "ranks")] == [line["ranks"] for line in lines(whole, "ranks")]
    assert_close(tensors(part), tensors(whole), 1e-5)


def test_a_run_that_another_process_writes_is_refused(config_file: Path, dense: Path) -> None:
    config = load_config(config_file)
    busy = "run/checkpoints is being written by another process; wait for it or choose another folder"
    with Trainer(config).locked():
        refuse(busy, train, 0, config_file, [])
        refuse(busy, compress_run, dense, config)
        with pytest.raises(RuntimeError, match=busy):
            run_processes(2, train, config_file, [])
    assert not [*(config_file.parent / "run").iterdir()]


def fit_with_one_test_row(process_rank: int, config_file: Path) -> None:
    config = load_config(config_file)
    manifest = read_manifest(Path(config.data.path))
    few = replace(manifest, splits=manifest.splits | {"test": replace(manifest.splits["test"], rows=1)})
    require_fit(config, Schema.from_manifest(manifest), few)


def test_batches_and_readers_that_cannot_be_shared_are_refused(config_file: Path) -> None:
    with pytest.raises(RuntimeError, match=r"data\.batch_size is 127, which 2 processes can't share equally: give a multiple"):
        run_processes(2, train, config_file, ["data.batch_size=127"])
    with pytest.raises(RuntimeError, match=r"the test split of .* has fewer rows than there are processes"):
        run_processes(2, fit_with_one_test_row, config_file)
    batch = ["data.batch_size=120"]  # 3 processes can't share 8 readers
    train(0, config_file, [*batch, "training.steps=6"])
    with pytest.raises(RuntimeError, match=r"8 readers made them, which 3 processes can't share: launch .* that divides 8"):
        run_processes(3, train, config_file, batch)


def test_controls_on_two_processes_equal_those_on_one(config_file: Path, tmp_path: Path) -> None:
    def runs(processes: str) -> list[list[str]]:
        return [[*EVERY_STEP, *overrides, f"output={tmp_path / name / processes}"] for name, overrides in CONTROLS.items()]

    on_one = train(0, config_file, *runs("one"))
    for overrides in runs("two"):
        Trainer(load_config(config_file, overrides)).save()  # dense tables that TorchRec builds would start with other values
    on_two = train_on(2, config_file, *runs("two"))
    for name, one, two in zip(CONTROLS, on_one, on_two, strict=True):
        folders = [tmp_path / name / processes for processes in ("one", "two")]
        assert losses(folders[1]) == pytest.approx(losses(folders[0]), rel=1e-5), name
        for key, tolerance in (("ne", 1e-5), ("auc", 1e-4)):  # AUC counts pairs of rows, one of which may swap
            measured = [[line[key] for line in lines(folder, "eval")] for folder in folders]
            assert measured[1] == pytest.approx(measured[0], rel=tolerance), (name, key)
        assert [two[key] for key in ("steps", "best_step", "rows")] == [one[key] for key in ("steps", "best_step", "rows")], name
        assert_close(tensors(folders[1], one["steps"]), tensors(folders[0], one["steps"]), 1e-5)
    assert on_one[-1]["best_step"] < on_one[-1]["steps"] < 24


def terminated(trainer: Trainer, owner: Any, method: str, step: int) -> list[Any]:
    """Train, and send SIGTERM only to process 1, in a method at a step; return what stopped it, and the latest checkpoint."""
    original = getattr(owner, method)

    def terminate(self: Any, *args: Any) -> Any:
        if trainer.steps == step and WORLD.process_rank == 1:
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


def stop_in_turn(rank: int, config_file: Path) -> list[Any]:
    quiet = ["training.log_every=100", "training.checkpoint_every=0"]
    evaluating = [*quiet, "training.eval_every=8", "data.eval_batch_size=50"]
    stops: list[Any] = [
        terminated(Trainer(load_config(config_file, quiet)), Trainer, "_step", 4),
        terminated(Trainer(load_config(config_file, evaluating)), BinaryMetrics, "update", 8),
    ]
    return [*stops, train(rank, config_file, evaluating)[0]["steps"]]


def test_processes_stop_at_the_same_step_if_one_is_terminated(config_file: Path) -> None:
    first, second = run_processes(2, stop_in_turn, config_file)
    assert first == second
    (in_a_step, kept), in_an_evaluation, steps = first
    assert in_a_step in ("stopped by SIGTERM at step 5", "stopped by SIGTERM at step 6"), "without waiting for a log line"
    assert kept == f"step_{int(in_a_step[-1]):08d}"
    assert in_an_evaluation == ["stopped by SIGTERM at step 8", "step_00000008"]
    assert steps == 12


def launched(killed_at: int, *arguments: str) -> None:
    """Run the command line. On the first attempt, process 0 is killed when a step's checkpoint is written but not yet renamed."""
    checksum = checkpoint._checksum

    def written(path: Path) -> int:
        if f"step_{killed_at:08d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(path)

    torch.set_num_threads(1)
    gc.freeze()
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "0"):
        checkpoint._checksum = written
    assert call(*arguments) == 0


def test_a_launched_run_whose_processes_are_killed_restarts_and_equals_an_unbroken_one(config_file: Path, tmp_path: Path) -> None:
    """One dies while writing a checkpoint, and torchrun's launcher restarts both. Only process 0 prints."""
    settings = [*RANKS, "training.checkpoint_every=4", "training.steps=14"]
    run_processes(2, train, config_file, [f"output={tmp_path / 'unbroken'}", *settings])
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method=CONTEXT.get_start_method(),
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL),
    )  # fmt: skip
    elastic_launch(launch, launched)(8, "train", "--config", str(config_file), f"output={tmp_path / 'broken'}", *settings)
    printed = {name: "".join(path.read_text() for path in tmp_path.rglob(f"{name}.log")) for name in ("stdout", "stderr")}
    assert "step 4 of 14" in printed["stderr"], "it resumed from the checkpoint before the one that was being written"
    assert printed["stdout"].count("14 steps, test AUC") == 1
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken")


def train_and_tell(rank: int, world_size: int, store: Path, config_file: Path, overrides: Sequence[str], has_started: Any) -> None:
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
        self._processes = [CONTEXT.Process(target=train_and_tell, args=(rank, *arguments)) for rank in range(processes)]
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
