"""Runs on several processes: resumed by another number of processes, pipelined, in groups, with asynchronous checkpoints."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comera_rec.distributed import Processes
from comera_rec.testing import run as run_processes
from comera_rec.training import checkpoint, evaluation
from comera_rec.training.checkpoint import checkpoint_at, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer

pytestmark = pytest.mark.distributed

RANKS = ["ranks.early_steps=4", "ranks.late_steps=6", "ranks.target_size=0.5", "ranks.truncate_every=2", "ranks.objective=budget"]
FORMATS = {
    "ranks and hot rows": ["tables.hot_rows=0.5", *RANKS],
    "dense": ["tables.format=dense", "linears.format=dense"],
}
# Adam's moments of a slice decay in every step if tables are replicated, and on one process only in steps that use it.
SAME = ["optimizer.name=adagrad", "optimizer.lr_dense=0.02", "optimizer.lr_cores=0.02", "training.log_every=1"]


def train(rank: int, config_file: Path, *runs: list[str]) -> list[bool]:
    """Train runs; return whether each one was pipelined."""
    pipelined = []
    for overrides in runs:
        trainer = Trainer(load_config(config_file, overrides))
        trainer.train()
        pipelined.append(trainer.step.pipeline is not None)
    return pipelined


def lines(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in written if line["kind"] == kind]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder)}


def tensors(folder: Path, step: int = 12) -> dict[str, torch.Tensor]:
    path = checkpoint_at(folder / "checkpoints", step)
    assert path is not None
    checkpoint = open_checkpoint(path)
    return checkpoint.read(sorted(checkpoint.sizes))


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("form", "changes"), [("dense", [(1, 2)]), ("ranks and hot rows", [(2, 1), (4, 2)])])
def test_another_number_of_processes_continues_a_run(
    config_file: Path, tmp_path: Path, form: str, changes: list[tuple[int, int]]
) -> None:
    for before, after in changes:
        whole, part = tmp_path / f"whole_{before}", tmp_path / f"part_{before}"
        settings = [*SAME, *FORMATS[form]]
        first = [*settings, f"output={part}", "training.steps=6"]
        run_processes(before, train, config_file, [*settings, f"output={whole}"], first)
        run_processes(after, train, config_file, [*settings, f"output={part}"])
        assert losses(part) == pytest.approx(losses(whole), rel=1e-5), (before, after)
        assert [line["ranks"] for line in lines(part, "ranks")] == [line["ranks"] for line in lines(whole, "ranks")]
        assert_close(tensors(part), tensors(whole), 1e-5)


def test_a_number_of_processes_that_cannot_share_the_readers_is_refused(config_file: Path) -> None:
    batch = ["data.batch_size=120"]  # 3 processes can't share 8 readers
    Trainer(load_config(config_file, [*batch, "training.steps=6"])).train()
    with pytest.raises(RuntimeError, match=r"8 readers made them, which 3 processes can't share: launch .* that divides 8"):
        run_processes(3, train, config_file, batch)


def test_a_pipelined_run_equals_the_plain_loop(config_file: Path, tmp_path: Path) -> None:
    runs, names = [], []
    for name, overrides in FORMATS.items():
        for pipeline in ("true", "false"):
            names.append(tmp_path / f"{name} {pipeline}")
            runs.append([*overrides, "training.eval_every=4", f"training.pipeline={pipeline}", f"output={names[-1]}"])
    for setting in ("training.accumulation=2", "tables.format=off"):  # these can't be pipelined
        runs.append([setting, f"output={tmp_path / setting}", "training.steps=2"])
    for pipelined in run_processes(2, train, config_file, *runs):
        assert pipelined == [True, False, True, False, False, False]
    for with_pipeline, without in ((names[0], names[1]), (names[2], names[3])):
        assert losses(with_pipeline) == pytest.approx(losses(without), rel=1e-5)
        assert [line["ne"] for line in lines(with_pipeline, "eval")] == pytest.approx(
            [line["ne"] for line in lines(without, "eval")], rel=1e-5
        )
        assert_close(tensors(with_pipeline), tensors(without), 1e-5)


BINNED = 100  # rows of a split above which AUC is binned
CONTROLS = {
    "clipping and weight decay": [
        "training.clip_grad_norm=0.1", "optimizer.weight_decay_dense=0.1", "optimizer.weight_decay_cores=0.1",
        "training.eval_every=4",
    ],
    "accumulation": ["training.accumulation=2", "ranks.early_steps=99", "ranks.gamma=0.5", "training.eval_every=4"],
    "early stopping": [
        "training.eval_every=2", "training.keep_best=true", "training.patience=2", "optimizer.lr_dense=0.3", "training.steps=24",
    ],
}  # fmt: skip


def train_with_binned_metrics(rank: int, config_file: Path, *runs: list[str]) -> list[dict[str, Any]]:
    evaluation.EXACT_ROWS = BINNED
    return [Trainer(load_config(config_file, overrides)).train() for overrides in runs]


def test_controls_on_two_processes_equal_those_on_one(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(processes: str) -> list[list[str]]:
        return [[*SAME, *overrides, f"output={tmp_path / name / processes}"] for name, overrides in CONTROLS.items()]

    monkeypatch.setattr(evaluation, "EXACT_ROWS", BINNED)
    on_one = train_with_binned_metrics(0, config_file, *runs("one"))
    for overrides in runs("two"):
        Trainer(load_config(config_file, overrides)).save()  # dense tables that TorchRec builds would start with other values
    on_two, _ = run_processes(2, train_with_binned_metrics, config_file, *runs("two"))
    for name, one, two in zip(CONTROLS, on_one, on_two, strict=True):
        folders = [tmp_path / name / processes for processes in ("one", "two")]
        assert losses(folders[1]) == pytest.approx(losses(folders[0]), rel=1e-5), name
        for key, tolerance in (("ne", 1e-5), ("auc", 1e-4)):  # AUC counts pairs of rows, one of which may swap
            measured = [[line[key] for line in lines(folder, "eval")] for folder in folders]
            assert measured[1] == pytest.approx(measured[0], rel=tolerance), (name, key)
        assert "auc_error" in one, "metrics were binned"
        assert [two[key] for key in ("steps", "best_step", "rows")] == [one[key] for key in ("steps", "best_step", "rows")], name
        assert_close(tensors(folders[1], one["steps"]), tensors(folders[0], one["steps"]), 1e-5)
    assert on_one[-1]["best_step"] < on_one[-1]["steps"] < 24


def train_in_groups(rank: int, config_file: Path, outputs: list[Path], overrides: list[str]) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    settings = [*overrides, f"output={outputs[rank // 2]}", f"seed={rank // 2}"]
    Trainer(load_config(config_file, settings), processes=Processes(groups[rank // 2])).train()


def test_two_groups_of_processes_train_one_run_each(config_file: Path, tmp_path: Path) -> None:
    overrides = [*FORMATS["ranks and hot rows"], "training.eval_every=4", "tables.min_rows=1", "checkpoints.asynchronous=true"]
    outputs = [tmp_path / "first", tmp_path / "second"]
    run_processes(4, train_in_groups, config_file, outputs, overrides)
    alone = [[*overrides, f"output={tmp_path / str(seed)}", f"seed={seed}"] for seed in range(2)]
    run_processes(2, train, config_file, *alone)
    for seed, output in enumerate(outputs):
        assert losses(output) == losses(tmp_path / str(seed))
        assert_close(tensors(output), tensors(tmp_path / str(seed)), 0)
    assert losses(outputs[0]) != losses(outputs[1])


def asynchronous(config_file: Path, *overrides: str) -> Trainer:
    settings = ["checkpoints.asynchronous=true", "training.checkpoint_every=2", "training.keep_checkpoints=9", *overrides]
    return Trainer(load_config(config_file, settings))


def test_asynchronous_checkpoints_are_those_of_their_step(config_file: Path, tmp_path: Path) -> None:
    both = ["training.checkpoint_every=2", "training.keep_checkpoints=9", *FORMATS["ranks and hot rows"]]
    runs = [[*both, f"output={tmp_path / kind}", f"checkpoints.asynchronous={kind}"] for kind in ("true", "false")]
    run_processes(2, train, config_file, *runs)
    for step in (2, 8, 12):
        assert_close(tensors(tmp_path / "true", step), tensors(tmp_path / "false", step), 0)


def test_steps_continue_while_a_checkpoint_is_written(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    further, save, step = threading.Event(), checkpoint.save_checkpoint, Trainer._step
    waited = []

    def slow(*args: Any, **options: Any) -> Path:
        waited.append(further.wait(60))
        return save(*args, **options)

    def noted(self: Trainer, batches: Any) -> torch.Tensor:
        if self.steps == 3:
            further.set()
        return step(self, batches)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    monkeypatch.setattr(Trainer, "_step", noted)
    trainer = asynchronous(config_file)
    trainer.train()
    assert all(waited)
    assert checkpoint_at(trainer.checkpoints, 2)


def test_a_failed_write_ends_the_run_at_the_next_step(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    trainer = asynchronous(config_file)
    with pytest.raises(OSError, match=r"cannot write checkpoint .*step_00000002 \(File exists\); free some space"):
        trainer.train()
    assert trainer.steps <= 4
    with pytest.raises(RuntimeError, match=r"cannot write checkpoint .*step_00000002 \(File exists\)"):
        run_processes(2, train, config_file, ["checkpoints.asynchronous=true", "training.checkpoint_every=2"])
