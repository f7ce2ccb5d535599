"""The subcommands that need a model, as users call them: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from comera_rec.cli.main import main
from comera_rec.training.runs import load_run
from tests.training.run_folders import DENSE, call


def test_train_evaluate_report_export(
    config_file: Path, data_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("")  # may stay
    assert call("train", "--config", config_file) == 0
    assert "12 steps, test AUC" in capsys.readouterr().out

    assert call("evaluate", "--checkpoint", run, "--data", data_set) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert set(metrics) == {"auc", "ne", "logloss", "rows"}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rows"] == 400

    other = shutil.copytree(data_set, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["categorical_columns"][1]["vocabulary"]["sha256"] = "0" * 64  # with the same number of values
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert call("evaluate", "--checkpoint", run, "--data", other) == 2
    assert f"was trained on other data than {other} holds (they differ in C2)" in capsys.readouterr().err

    assert "<svg" in (run / "report.html").read_text()
    assert call("report", "--run", run) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert {"params", "bytes", "auc", "ne", "logloss", "step_ms", "peak_mib"} <= set(summary["run"])

    assert call("export", "--checkpoint", run, "--output", tmp_path / "exported") == 0
    description = json.loads((tmp_path / "exported" / "model.json").read_text())
    dim = description["model"]["embedding_dim"]
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows in description["tables"].items()
    ]
    DLRM(EmbeddingBagCollection(tables), 13, [32, dim], [32, 1]).load_state_dict(torch.load(tmp_path / "exported" / "model.pt"))
    assert call("export", "--checkpoint", run, "--output", tmp_path / "exported") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "{tmp}/absent.toml"], "absent.toml"),
        (["train", "--config", "{config}", "data.batchsize=3"], "unknown key data.batchsize; did you mean data.batch_size?"),
        (["train", "--config", "{config}", "data.path={tmp}/nowhere"], "is not a preprocessed data set"),
        (["train", "--config", "{config}", "output=/dev/null/run"], "/dev/null/run"),
        (["train", "--config", "{config}", "output={config}"], "run.toml, which is a file: give a folder"),
        (["train", "--config", "{config}", "training.task_weights=[1, 2, 3]"], "3 numbers and {data} the labels label: give one"),
        (["train", "--config", "{config}", "tables.start=vectors"], "preprocess with --order similarity"),
        (["evaluate", "--checkpoint", "{tmp}/nowhere", "--data", "{data}"], "holds no checkpoint"),
        (["evaluate", "--checkpoint", "{tmp}", "--data", "{data}", "--split", "exam"], "split 'exam' is not in"),
        (
            ["train", "--config", "{config}", "ranks.early_steps=3", *DENSE],
            "neither tables nor linear layers have any: add ranks=none",
        ),
        (["export", "--checkpoint", "{tmp}/nowhere", "--output", "{tmp}/m.pt2"], "holds no checkpoint"),
        (["serve", "--model", "{tmp}"], "is a folder: give a MODEL.pt2 that `comera export` wrote from it"),
        (["report", "--run", "{tmp}/nowhere"], "nowhere"),
        (["report", "--run", "{tmp}/nowhere", "--truth", "{config}"], "is not what `comera synth` wrote beside its log"),
        (["train", "--config", "{data}/train/part-00000.parquet"], "can't be parsed"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
    ],
)
def test_mistakes_are_one_line_and_status_two(
    arguments: list[str], message: str, config_file: Path, data_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [a.format(tmp=tmp_path, config=config_file, data=data_set) for a in arguments]
    assert call(*filled) == 2
    captured = capsys.readouterr()
    assert message.format(data=data_set) in captured.err
    assert captured.err.startswith("comera: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_any_column_name_works_from_log_to_export(config_file: Path, tmp_path: Path) -> None:
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
    assert call("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "exported") == 0
    assert list(json.loads((tmp_path / "exported" / "model.json").read_text())["tables"]) == names
    state = torch.load(tmp_path / "exported" / "model.pt")
    tables_there = [unquote(key.split(".")[-2]) for key in state if ".embedding_bags." in key]
    assert sorted(tables_there) == sorted(names)


def test_a_compression_in_a_file_is_lowered_to_what_small_tables_reach(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(config_file.read_text().replace("tt_ranks = 4\nmin_rows", "compression = 5000\nmin_rows"))
    assert call("train", "--config", config_file) == 0
    assert "are too small for compression 5000; they use" in capsys.readouterr().err
    _, config, _ = load_run(tmp_path / "run")
    most = config.tables.compression
    assert most is not None
    assert 1 < most < 5000
    assert call("train", "--config", config_file) == 0, "the same command resumes"
    assert call("train", "--config", config_file, "tables.compression=5000", f"output={tmp_path / 'other'}") == 2
    assert f"lower compression to {most:g}" in capsys.readouterr().err


def test_no_command_replaces_files_of_something_else(
    dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    with pytest.raises(ValueError, match="is not a run"):
        main(bug)
