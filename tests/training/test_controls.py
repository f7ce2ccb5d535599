"""Configs: defaults, overrides and mistakes. Controls: learning rates, weight decay, the best checkpoint, early stopping.

Commands that need a model, as users call them: what they print, what they write, and how they fail."""

import json
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from refusals import refuse

from comera_rec.cli.main import main
from comera_rec.training.checkpoint import save_checkpoint
from comera_rec.training.config import OptimizerConfig, load_config, parse_config
from comera_rec.training.evaluation import evaluate
from comera_rec.training.runs import load_run, open_run
from comera_rec.training.step import rate_factor
from comera_rec.training.trainer import Trainer
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth
from tests.training.run_folders import DENSE, call, run, validation

MINIMAL = {"output": "runs/x", "data": {"path": "data"}}
# Learning rates at which the first steps are the best.
OVERSHOOTING = ["training.eval_every=2", "training.keep_best=true", "optimizer.lr_dense=0.5", "optimizer.lr_cores=0.5"]


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('\ufeffoutput = "a"\n[data]\npath = "d"\n[ranks]\nearly_steps = 5\n')
    overrides = ["output=b", "model.over_arch=[64, 32]", "tables.tt_ranks=[3]", "optimizer.lr_dense=1e-3", "ranks=none"]
    config = load_config(path, overrides)
    assert (config.output, config.data.batch_size, config.ranks) == ("b", 2048, None)
    assert (config.model.over_arch, config.tables.tt_ranks, config.optimizer.lr_dense) == ((64, 32), (3,), 1e-3)
    assert load_config(None, ["data.path=data", "output=runs/x", "seed=2"]) == parse_config({**MINIMAL, "seed": 2})
    assert load_config(None, ["data.path=data", "output=2026-01-31T12:00:01"]).output == "2026-01-31T12:00:01", "no time"


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
    refuse(message, parse_config, {**MINIMAL, **change})


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
        trainer = Trainer(load_config(config_file, [*DENSE, "training.steps=8", "optimizer.lr_dense=0.008", *overrides]))
        table = next(table for name, table in trainer.model.state_dict().items() if name.endswith("embedding_bags.C1.weight"))
        before = table.clone()
        trainer.step(8, iter(trainer.loader))
        moves.append(table - before)
    assert {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}["dense"] == pytest.approx(0.001)
    assert moves[0].abs().max() > 0
    torch.testing.assert_close(moves[1], moves[0] / 8)


def test_weights_decay_by_their_kind(config_file: Path) -> None:
    decays = ["optimizer.weight_decay_dense=1.0", "optimizer.weight_decay_cores=2.0"]
    groups = Trainer(load_config(config_file, decays)).optimizer.param_groups
    assert {group["name"]: group["weight_decay"] for group in groups} == {"cores": 2, "dense": 1, "biases": 0, "ranks": 0}
    assert all(parameter.dim() > 1 for group in groups if group["weight_decay"] for parameter in group["params"])


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

    shutil.rmtree(trainer.checkpoints / f"step_{best:08d}")
    refuse(rf"no longer holds the checkpoint of its best step, {best}: take the last one \(--last\)", load_run, trainer.folder)
    save_checkpoint(trainer.checkpoints, 20, {"step": 20, "best": {"step": None}}, {"weight": torch.ones(1)})
    refuse(r"holds a checkpoint whose model can't be made \('config'\): give another run", load_run, trainer.folder)


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
    assert all(again[key] == result[key] for key in ("ne", "auc", "steps", "best_step"))


def test_no_checkpoint_is_the_best_while_ranks_shrink(config_file: Path) -> None:
    ranks = ["ranks.early_steps=2", "ranks.late_steps=6", "ranks.target_size=0.5", "ranks.truncate_every=2"]
    trainer, result = run(config_file, *OVERSHOOTING, "training.patience=2", *ranks)
    measured = validation(trainer.folder)
    assert result["best_step"] == min((step for step in measured if step >= 8), key=lambda step: measured[step])
    assert min(measured, key=lambda step: measured[step]) < 8


def test_splits_of_one_class_have_no_metrics(config_file: Path, data_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, data, run = (config_file.with_name(name) for name in ("log.txt", "data", "run"))
    rows = (data_set.parent / "train.txt").read_text().splitlines(keepends=True)
    log.write_text("".join(rows[:3200] + [f"0{row[1:]}" for row in rows[3200:]]))
    preprocess(PreprocessOptions(inputs=(log,), output=data))
    assert call("train", "--config", config_file, f"data.path={data}", *OVERSHOOTING, "training.patience=1") == 0
    printed = capsys.readouterr()
    assert "run: 12 steps, test AUC and NE undefined, " in printed.out
    for split in ("val", "test"):
        assert printed.err.count(f"run: {split} has no metrics: all 400 labels are 0, so AUC and NE are undefined") == 1
    assert validation(run) == dict.fromkeys(range(2, 13, 2)), "none is the best, nor worse than that"
    result = json.loads((run / "result.json").read_text())
    assert [result[key] for key in ("auc", "ne", "logloss", "rows", "best_step")] == [None, None, None, 400, None]
    assert call("evaluate", "--checkpoint", run, "--data", data) == 2
    assert capsys.readouterr().err.startswith("comera: all 400 labels are 0, so AUC and NE are undefined")


def test_a_teachers_predictions_take_the_place_of_labels(dense: Path, config_file: Path) -> None:
    student = Trainer(load_config(config_file, [*DENSE, f"training.teacher={dense}"]), load_run(dense)[0])
    loss = student.step.loss_of(next(iter(student.loader)))
    gradients = torch.autograd.grad(loss, student.optimizer.param_groups[0]["params"])
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6, "who predicts like the teacher has nothing to learn"


def test_runs_of_other_data_are_refused(dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    synth(SynthOptions(rows=600, output=tmp_path / "other.txt", seed=9, scale=0.01))
    preprocess(PreprocessOptions(inputs=(tmp_path / "other.txt",), output=other))
    settings = [f"data.path={other}", f"output={tmp_path / 'run'}", f"training.teacher={dense}"]
    for command in (["train", "--config", config_file, *settings], ["evaluate", "--checkpoint", dense, "--data", other]):
        assert call(*command) == 2
        assert f"was trained on other data than {other} holds (they differ in" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "{tmp}/absent.toml"], "absent.toml"),
        (["train", "--config", "{config}", "x"], "override 'x' is not of the form section.key=value"),
        (["train", "--config", "{config}", "output.x=1"], "output is a value, not a section"),
        (["train"], "config: output is missing"),
        (["train", "--config", "{config}", "data.path={tmp}/nowhere"], "is not a preprocessed data set"),
        (["train", "--config", "{config}", "output=/dev/null/run"], "/dev/null/run"),
        (["train", "--config", "{config}", "output={config}"], "run.toml, which is a file: give a folder"),
        (["train", "--config", "{config}", "training.task_weights=[1, 2, 3]"], "3 numbers and {data} the labels label: give one"),
        (["train", "--config", "{config}", "tables.start=vectors"], "preprocess with --order similarity"),
        (["evaluate", "--checkpoint", "{tmp}/nowhere", "--data", "{data}"], "holds no checkpoint: give a run's folder"),
        (["train", "--config", "{config}", "training.teacher={tmp}/nowhere"], "holds no checkpoint"),
        (["evaluate", "--checkpoint", "{tmp}", "--data", "{data}", "--split", "exam"], "split 'exam' is not in"),
        (["train", "--config", "{config}", "ranks.early_steps=3", *DENSE], "tables nor linear layers have any: add ranks=none"),
        (["serve", "--model", "{tmp}"], "is a folder: give a MODEL.pt2 that `comera export` wrote from it"),
        (["report", "--run", "{tmp}/nowhere", "--truth", "{config}"], "is not what `comera synth` wrote beside its log"),
        (["train", "--config", "{data}/train/part-00000.parquet"], "can't be parsed"),
        (["compress", "tables.format=dense"], "tables.format is 'dense': compressing needs 'tt'"),
        (["compress", "model.over_arch=[16]"], "other sizes of [model]"),
        (["compress", "--output", "{dense}"], "holds checkpoints already"),
        (["compress", "--checkpoint", "{tmp}/nowhere"], "holds no checkpoint"),
        pytest.param(
            ["train", "--config", "{config}", "training.device=cuda"],
            "training.device is cuda but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        (["export", "--checkpoint", "{dense}", "--output", "{tmp}/new", "--dtype", "int8", "--data", "."], "no --data, --dtype: "),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
    ],
)
def test_mistakes_are_one_line_and_status_two(
    arguments: list[str], message: str, config_file: Path, data_set: Path, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "compress":
        arguments = ["compress", "--checkpoint", "{dense}", "--config", "{config}", "--output", "{tmp}/new", *arguments[1:]]
    filled = [a.format(tmp=config_file.parent, config=config_file, data=data_set, dense=dense) for a in arguments]
    assert call(*filled) == 2
    captured = capsys.readouterr()
    assert message.format(data=data_set) in captured.err
    assert captured.err.startswith("comera: ")
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert not (config_file.parent / "new").exists()


def test_any_column_name_works_from_log_to_export(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a.b", "a%2Eb", "50%", "a b", "weight", "training", "é", "type", "keys", "x/y", "_parameters", ".hidden", ".."]
    numbers, labels = ["n.1", "values"], ["click.x", "items"]
    kinds = [(name, kind) for kind, group in (("label", labels), ("integer", numbers), ("category", names)) for name in group]
    schema, log, data = tmp_path / "schema.toml", tmp_path / "log.csv", tmp_path / "data"
    schema.write_text('header = true\nseparator = ","\n[columns]\n' + "".join(f'"{name}" = "{kind}"\n' for name, kind in kinds))
    rows = [[row % 2, row % 3 % 2] + [row % 7] * len(numbers) + [f"v{row % 150}"] * len(names) for row in range(1500)]
    log.write_text("\n".join(",".join(map(str, row)) for row in [[name for name, _ in kinds], *rows]) + "\n")
    assert call("preprocess", "--input", log, "--schema", schema, "--output", data) == 0
    same = [f"data.path={data}", "training.steps=2", 'tables.dense_tables=["a.b", "type"]']
    assert call("train", "--config", config_file, *same) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f">{name}<" in page for name in names)
    assert call("evaluate", "--checkpoint", tmp_path / "run", "--data", data) == 0
    (tmp_path / ".exported.partial" / "of a killed one").mkdir(parents=True)
    assert call("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "exported") == 0
    assert sorted(path.name for path in tmp_path.rglob("*") if "exported" in str(path)) == ["exported", "model.json", "model.pt"]
    assert call("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "exported") == 2
    assert list(json.loads((tmp_path / "exported" / "model.json").read_text())["tables"]) == names
    state = torch.load(tmp_path / "exported" / "model.pt")
    assert sorted(unquote(key.split(".")[-2]) for key in state if ".embedding_bags." in key) == sorted(names)
    data.rename(tmp_path / "moved")
    assert call("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "model.pt2") == 2
    assert "; the run was trained on this folder: name another with --data\n" in capsys.readouterr().err


def test_compressions_in_files_are_lowered_if_needed(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file.write_text(config_file.read_text().replace("tt_ranks = 4\nmin_rows", "compression = 5000\nmin_rows"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text("")  # may be there
    assert call("train", "--config", config_file) == 0
    assert "are too small for compression 5000; they use" in capsys.readouterr().err
    most = load_run(tmp_path / "run")[1].tables.compression
    assert 1 < most < 5000
    assert call("train", "--config", config_file) == 0, "the same command resumes"
    assert call("train", "--config", config_file, "tables.compression=5000", f"output={tmp_path / 'other'}") == 2
    assert f"lower compression to {most:g}" in capsys.readouterr().err
    assert (
        call("train", "--config", config_file, "tables.min_rows=9999999", "training.steps=1", f"output={tmp_path / 'other'}") == 0
    )
    assert (
        "stay dense: those outside of tables.dense_tables have fewer rows than tables.min_rows, 9999999" in capsys.readouterr().err
    )


def test_files_of_something_else_stay(dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, mine = str(shutil.copytree(dense, tmp_path / "run")), tmp_path / "mine"
    (mine / "page").mkdir(parents=True)
    names = ("page/notes.toml", "model.pt2", "summary.json", "config.json")
    for name in names:
        (mine / name).write_text("important")
    for command, message in {
        ("report", "--run", run, "--output", "page/notes.toml"): "notes.toml exists and is not an HTML page; choose another name",
        ("report", "--run", run, "--output", "new.html"): "summary.json exists and is not a summary of runs: choose another folder",
        ("export", "--checkpoint", run, "--output", "model.pt2"): "model.pt2 exists and is not a package of `comera export`",
        ("export", "--checkpoint", run, "--output", "page/notes.toml"): "notes.toml exists: give a new folder, or the name of a",
        ("train", "--config", str(config_file), "--output", ""): f"{mine} holds config.json of something else than a run",
    }.items():
        assert call(*command[:-1], mine / command[-1]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.relative_to(mine).as_posix() for path in mine.rglob("*.*")) == sorted(names)
    assert {(mine / name).read_text() for name in names} == {"important"}
    assert call("report", "--run", run, "--run", run) == 0, "its own page and summary are replaced"
    assert call("report", "--run", run, "--run", run) == 0


def test_bugs_show_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = ["report", "--run", "/nowhere"]
    monkeypatch.setattr("comera_rec.cli.report.require_page", lambda page: f"{page:d}")
    with pytest.raises(TypeError, match="format"):
        main(bug)
    monkeypatch.undo()
    assert call(*bug) == 2
    monkeypatch.setenv("COMERA_TRACEBACK", "1")
    refuse("is not a run", main, bug)
