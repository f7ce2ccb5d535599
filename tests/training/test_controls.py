"""Configs: defaults, overrides and mistakes. Controls: learning rates, weight decay, the best checkpoint, early stopping."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_rec.training.checkpoint import checkpoint_at
from comera_rec.training.config import OptimizerConfig, load_config, parse_config
from comera_rec.training.evaluation import evaluate
from comera_rec.training.model import Schema
from comera_rec.training.runs import load_run, open_run
from comera_rec.training.step import rate_factor
from comera_rec.training.trainer import Trainer
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth
from tests.training.run_folders import DENSE, call, validation

MINIMAL = {"output": "runs/x", "data": {"path": "data"}}


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('output = "a"\n[data]\npath = "d"\n[ranks]\nearly_steps = 5\n')
    config = load_config(
        path, ["output=b", "model.over_arch=[64, 32]", "tables.tt_ranks=[3]", "optimizer.lr_dense=1e-3", "ranks=none"]
    )
    assert config.output == "b"
    assert config.model.over_arch == (64, 32)
    assert config.tables.tt_ranks == (3,)
    assert config.optimizer.lr_dense == 1e-3
    assert config.ranks is None
    assert config.data.batch_size == 2048


def test_a_written_config_is_read_back(tmp_path: Path) -> None:
    config = parse_config(
        {**MINIMAL, "ranks": {"early_steps": 7, "late_steps": 3, "target_size": 0.5}, "tables": {"compression": 50}}
    )
    assert parse_config(config.to_dict()) == config
    assert load_config(None, ["data.path=data", "output=runs/x", "seed=2"]) == parse_config({**MINIMAL, "seed": 2}), (
        "without a file"
    )


def test_differing_columns_are_listed_in_their_order() -> None:
    schema = Schema(dense=(), sparse={f"C{number}": 10 for number in range(1, 12)}, vocabularies={"C3": "a", "C4": "a"})
    other = Schema(dense=(), sparse=schema.sparse | {"C2": 9, "C10": 9, "D1": 9}, vocabularies={"C3": "b", "C5": "b"})
    assert schema.differences(other) == ["C2", "C3", "C10", "D1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"path": "d", "batchsize": 4}}, r"unknown key data\.batchsize; did you mean data\.batch_size\?"),
        ({"compression": 50}, r"unknown key compression; did you mean tables.compression\?"),
        ({"zzz": 1}, r"unknown key zzz; known keys: output, data"),
        ({"data": {"path": "d", "batch_size": 0}}, r"data\.batch_size: Input should be greater than 0, not 0"),
        ({"data": {}}, r"data\.path is missing: set it in the file, or as data\.path=VALUE on the command line"),
        ({"tables": {"format": "sparse"}}, r"tables\.format: Input should be 'tt' or 'dense'"),
        ({"tables": {"tt_ranks": 4, "compression": 9}}, r"tt_ranks 4 and compression 9\.0 are both given"),
        ({"linears": {"tt_ranks": [4, -1, 4]}}, r"tt_ranks is -1: give a positive integer"),
        ({"ranks": {"early_steps": 1, "target_size": 0.5}}, r"a late stage needs both"),
        ({"model": {"over_arch": []}}, r"model\.over_arch is empty: give at least one layer size, as dlrm needs"),
        ({"data": {"path": "d", "batch_size": "12"}}, r"data\.batch_size: Input should be a valid integer"),
        ({"training": {"epochs": float("inf")}}, r"training\.epochs is inf: give a finite number"),
        ({"training": {"task_weights": [1.0, 0.0]}}, r"training\.task_weights\.1: Input should be greater than 0, not 0\.0"),
        ({"training": {"keep_best": True}}, r"training\.keep_best is True but nothing is evaluated: set training\.eval_every"),
        ({"training": {"precision": "float16"}}, r"training\.precision: Input should be 'float32' or 'bfloat16', not"),
        ({"output": ""}, r"output is empty: give the run's folder"),
        ({"seed": 2**63}, r"seed: Input should be less than 9223372036854775808, not 9223372036854775808"),
    ],
)
def test_mistakes(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_config({**MINIMAL, **change})
    assert "\n" not in str(caught.value)


def test_bad_override_and_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('output = "a"\n[data]\npath = "d"\n')
    with pytest.raises(ValueError, match=r"override 'x' is not of the form section\.key=value"):
        load_config(path, ["x"])
    with pytest.raises(ValueError, match="output is a value, not a section"):
        load_config(path, ["output.x=1"])
    with pytest.raises(ValueError, match=r"config: output is missing"):
        load_config(None)
    path.write_text("output = ")
    with pytest.raises(ValueError, match=r"run\.toml can't be parsed"):
        load_config(path)


# Learning rates at which the first steps are the best.
OVERSHOOTING = ["training.eval_every=2", "training.keep_best=true", "optimizer.lr_dense=0.5", "optimizer.lr_cores=0.5"]


def run(config_file: Path, *overrides: str) -> tuple[Trainer, dict[str, Any]]:
    trainer = Trainer(load_config(config_file, overrides))
    return trainer, trainer.train()


def factors(total_steps: int = 10, **schedule: float) -> list[float]:
    return [rate_factor(OptimizerConfig(**schedule), number, total_steps) for number in range(1, total_steps + 1)]  # type: ignore[arg-type]


def test_rates_rise_stay_and_fall() -> None:
    assert factors() == [1.0] * 10
    assert factors(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert factors(decay=0.5) == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2])
    assert factors(decay=1.0, warmup_steps=1) == pytest.approx([0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert min(factors(decay=0.001)) > 0


def test_a_run_ends_at_small_rates_for_tables_updated_in_backward_too(config_file: Path) -> None:
    moves = []
    for overrides in ([], ["optimizer.decay=1"]):
        settings = [*DENSE, "training.steps=8", "optimizer.lr_dense=0.008", *overrides]
        trainer = Trainer(load_config(config_file, settings))
        table = next(table for name, table in trainer.model.state_dict().items() if name.endswith("embedding_bags.C1.weight"))
        before = table.clone()
        trainer.step(8, iter(trainer.loader))
        moves.append(table - before)
    assert {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}["dense"] == pytest.approx(0.001)
    assert moves[0].abs().max() > 0
    torch.testing.assert_close(moves[1], moves[0] / 8)


@pytest.mark.parametrize("kind", ["cores", "dense"])
def test_weights_decay_by_their_kind(config_file: Path, tmp_path: Path, kind: str) -> None:
    settings = ["optimizer.name=adagrad", "training.steps=6"]
    plain, _ = run(config_file, *settings, f"output={tmp_path / 'plain'}")
    decayed, _ = run(config_file, *settings, f"optimizer.weight_decay_{kind}=1.0", f"output={tmp_path / 'decayed'}")
    groups = {group["name"]: group["weight_decay"] for group in decayed.optimizer.param_groups}
    assert groups["ranks"] == 0
    assert groups[kind] == 1
    assert groups.get("biases", 0) == 0
    before, after = (_weights(trainer, kind) for trainer in (plain, decayed))
    assert float(after.norm()) < 0.99 * float(before.norm())


def _weights(trainer: Trainer, kind: str) -> torch.Tensor:
    group = next(group for group in trainer.optimizer.param_groups if group["name"] == kind)
    return torch.cat([parameter.detach().flatten() for parameter in group["params"] if parameter.dim() > 1])


def test_the_best_checkpoint_is_kept_and_loaded(config_file: Path, data_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, result = run(config_file, *OVERSHOOTING, "training.keep_checkpoints=1")
    measured = validation(trainer.folder)
    best = min(measured, key=lambda step: measured[step])
    assert best < 8, measured
    assert result["best_step"] == best
    assert {path.stem for path in trainer.checkpoints.iterdir()} == {f"step_{best:08d}", "step_00000012"}
    assert open_run(trainer.folder).record["step"] == best
    model, _, _ = load_run(trainer.folder)
    again = evaluate(model, trainer._batches("val", shuffle=False), torch.device("cpu"))
    assert again["ne"] == pytest.approx(measured[best], rel=1e-5)
    assert load_run(trainer.folder, last=True)[0].state_dict().keys() == model.state_dict().keys()

    printed = []
    for flags in ([], ["--last"]):
        assert call("evaluate", "--checkpoint", trainer.folder, "--data", data_set, *flags) == 0
        printed.append(json.loads(capsys.readouterr().out)["ne"])
    assert printed[0] == pytest.approx(result["ne"], rel=1e-5), "the result is that of the best"
    assert printed[1] > printed[0]

    path = checkpoint_at(trainer.checkpoints, best)
    assert path is not None
    shutil.rmtree(path)
    with pytest.raises(ValueError, match=rf"no longer holds the checkpoint of its best step, {best}: take the last one \(--last\)"):
        load_run(trainer.folder)


def test_patience_ends_a_run_that_resumes_as_if_it_had_never_stopped(config_file: Path, tmp_path: Path) -> None:
    settings = [*OVERSHOOTING, "training.patience=2"]
    trainer, result = run(config_file, *settings)
    measured = validation(trainer.folder)
    best = min(measured, key=lambda step: measured[step])
    assert list(measured) == list(range(2, best + 5, 2))
    assert result["steps"] == best + 4 < 12
    assert run(config_file, *settings)[1] == result

    part = [f"output={tmp_path / 'part'}"]
    run(config_file, *settings, *part, f"training.steps={best + 2}")
    resumed, again = run(config_file, *settings, *part)
    assert validation(resumed.folder) == measured
    assert {key: again[key] for key in ("ne", "auc", "steps", "best_step")} == {
        key: result[key] for key in ("ne", "auc", "steps", "best_step")
    }


def test_no_checkpoint_is_the_best_while_ranks_shrink(config_file: Path) -> None:
    ranks = ["ranks.early_steps=2", "ranks.late_steps=6", "ranks.target_size=0.5", "ranks.truncate_every=2"]
    trainer, result = run(config_file, *OVERSHOOTING, "training.patience=2", *ranks)
    measured = validation(trainer.folder)
    assert result["best_step"] == min((step for step in measured if step >= 8), key=lambda step: measured[step])
    assert min(measured, key=lambda step: measured[step]) < 8


def test_a_teachers_predictions_take_the_place_of_labels(dense: Path, config_file: Path) -> None:
    student = Trainer(load_config(config_file, [*DENSE, f"training.teacher={dense}"]), load_run(dense)[0])
    loss = student.step.loss_of(next(iter(student.loader)))
    gradients = torch.autograd.grad(loss, student.optimizer.param_groups[0]["params"])
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6, "who predicts like the teacher has nothing to learn"


def test_teachers_that_do_not_fit_are_refused(
    dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", "--config", config_file, f"training.teacher={tmp_path / 'nothing'}") == 2
    assert f"{tmp_path / 'nothing'} holds no checkpoint: give a run's folder" in capsys.readouterr().err
    other = tmp_path / "other"
    synth(SynthOptions(rows=600, output=tmp_path / "other.txt", seed=9, scale=0.01))
    preprocess(PreprocessOptions(inputs=(tmp_path / "other.txt",), output=other))
    settings = [f"data.path={other}", f"output={tmp_path / 'run'}", f"training.teacher={dense}"]
    assert call("train", "--config", config_file, *settings) == 2
    assert f"was trained on other data than {other} holds (they differ in" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
