"""Training: exact resuming, shrinking ranks, clean stops, and reported sizes that agree with the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.metrics import BinaryMetrics
from comera_rec.training.model import Schema
from comera_rec.training.runs import require_fit
from comera_rec.training.stopping import Interrupted, StopSignals
from comera_rec.training.trainer import Diverged, Trainer
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth
from tests.training.run_folders import assert_same_run, lines, weights


def run(config_file: Path, *overrides: str) -> tuple[Path, dict[str, Any]]:
    config = load_config(config_file, overrides)
    return Path(config.output), Trainer(config).train()


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[Trainer, torch.Tensor], torch.Tensor | None]) -> None:
    """Let a trainer call `act(trainer, loss)` after a step; what it returns, if anything, replaces the loss."""
    step = Trainer._step

    def noted(self: Trainer, batches: Any) -> torch.Tensor:
        loss = step(self, batches)
        changed = act(self, loss) if self.steps == number else None
        return loss if changed is None else changed

    monkeypatch.setattr(Trainer, "_step", noted)


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_data_without_categories_is_refused(config_file: Path, data_set: Path) -> None:
    manifest = read_manifest(data_set)
    schema = replace(Schema.from_manifest(manifest), sparse={})
    with pytest.raises(ValueError, match="has no categories, so a model would have no tables"):
        require_fit(load_config(config_file), schema, manifest)


def test_a_run_that_misses_its_target_size_says_why(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["ranks.early_steps=4", "ranks.late_steps=4", "ranks.target_params=200", "ranks.truncate_every=2"]
    run(config_file, *settings, "ranks.objective=achievement")
    assert "above their target of 200: start a new run with" in capsys.readouterr().err
    run(config_file, *settings, f"output={config_file.parent / 'budget'}")
    assert "above their target" not in capsys.readouterr().err
    run(config_file, *settings, "ranks.late_steps=9", f"output={config_file.parent / 'short'}")
    printed = capsys.readouterr().err
    assert "the run ended after 12 steps, in the late stage of its ranks, which reach their final size after 13:" in printed


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(trainer: Trainer, loss: torch.Tensor) -> None:  # the loss is that of the previous weights
        next(trainer.module.parameters()).data[0] = float("nan")

    for step, act, message in (
        (8, lambda trainer, loss: loss * float("nan"), r"the loss is nan at step 8: .*step_00000006"),
        (12, poison, r"^weights .* are not finite at step 12: .* the last good checkpoint is .*step_00000006"),
    ):
        folder = tmp_path / str(step)
        with monkeypatch.context() as patch:
            after_step(patch, step, act)
            with pytest.raises(Diverged, match=message):
                run(config_file, f"output={folder}")
        assert latest_checkpoint(folder / "checkpoints") == folder / "checkpoints" / "step_00000006"
        assert all(weight.isfinite().all() for weight in weights(folder).values())
        assert not (folder / "result.json").exists()


@pytest.mark.parametrize("last_step", [4, 12])
def test_sigterm_stops_an_evaluation_and_the_next_run_repeats_it(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_step: int
) -> None:
    evaluating = ["training.eval_every=4", "data.eval_batch_size=100"]
    whole, _ = run(config_file, *evaluating, f"output={tmp_path / 'whole'}")
    if last_step == 12:
        run(config_file, *evaluating, "training.steps=11")
    update = BinaryMetrics.update
    with monkeypatch.context() as patch:
        patch.setattr(BinaryMetrics, "update", lambda *batch: terminate() or update(*batch))
        with pytest.raises(Interrupted, match=f"stopped by SIGTERM at step {last_step} with a checkpoint"):
            run(config_file, *evaluating)
    folder, _ = run(config_file, *evaluating)
    if last_step == 4:
        assert_same_run(folder, whole)
    assert [(line["step"], line["split"]) for line in lines(folder, "eval")][-2:] == [(12, "val"), (12, "test")]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_second_ctrl_c_ends_the_process_at_once(second: signal.Signals) -> None:
    child = os.fork()
    if not child:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            noted = signals.after_step() == signal.SIGINT
            os.kill(os.getpid(), second)
        os._exit(17 if noted else 1)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGINT if second == signal.SIGINT else 17)


def test_a_run_resumes_with_moved_data_but_not_with_other_data_or_settings(
    config_file: Path, data_set: Path, tmp_path: Path
) -> None:
    run(config_file, "training.steps=3")
    with pytest.raises(ValueError, match=r"holds another run: its config differs in seed, tables, data\.batch_size"):
        run(config_file, "seed=4", "tables.tt_ranks=2", "data.batch_size=32")
    moved = tmp_path / "moved"
    shutil.copytree(data_set, moved)
    elsewhere = [f"data.path={moved}", "data.prefetch=2", "data.eval_batch_size=100"]
    assert run(config_file, "training.steps=6", *elsewhere)[1]["steps"] == 6

    manifest = json.loads((moved / "manifest.json").read_text())
    columns = manifest["categorical_columns"]
    for change, named in (
        (lambda: manifest["splits"]["train"]["shards"][0].update(sha256="0" * 64), "rows than .*moved holds: "),
        (lambda: columns[1]["vocabulary"].update(sha256="0" * 64), r"data than .* \(they differ in C2\): "),
        (
            lambda: columns[0].update(num_embeddings=columns[0]["num_embeddings"] + 1),
            r"data than .* \(they differ in C1, C2\): ",
        ),
    ):
        change()
        (moved / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=rf"was trained on other {named}give the"):
            run(config_file, *elsewhere)


def test_data_without_validation_rows(config_file: Path, tmp_path: Path) -> None:
    synth(SynthOptions(rows=2000, output=tmp_path / "train.txt", seed=1, scale=0.001))
    data = tmp_path / "no_val"
    preprocess(PreprocessOptions(inputs=(tmp_path / "train.txt",), output=data, val_fraction=0.0, test_fraction=0.0))
    with pytest.raises(ValueError, match=r"training\.eval_every is 5 but .* has no validation rows"):
        run(config_file, f"data.path={data}", "training.eval_every=5")
    _, result = run(config_file, f"data.path={data}")
    assert result["split"] == "train"


def test_a_missing_gpu_is_reported(config_file: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r"training\.device is cuda but torch sees no GPU"):
        run(config_file, "training.device=cuda")
