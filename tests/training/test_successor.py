"""Runs that start from others: on later data where another one ended, or compressed from a dense one.

On later data, known ids keep rows, ranks and optimizer state, and new ids get rows. A compressed run is nearly equal to the dense
one at full ranks, within its budget, and trainable.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comera_rec.convert import compression_report
from comera_rec.nn import TTTable
from comera_rec.report import charts
from comera_rec.training.config import load_config
from comera_rec.training.from_runs import compress_run
from comera_rec.training.runs import load_run
from tests.training.run_folders import RANKS, call, tensors


@pytest.fixture(autouse=True)
def _no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than such small runs."""
    monkeypatch.setattr(charts, "curves", lambda runs, best_auc: [])
    monkeypatch.setattr(charts, "ranks_over_time", lambda run: "")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets day_1, and day_2 and day_3, each of which extends the one before; and `other`, which extends none."""
    folder = tmp_path_factory.mktemp("days")
    assert call("synth", "--rows", 6000, "--scale", 0.002, "--output", folder / "log.txt") == 0
    lines = (folder / "log.txt").read_text().splitlines(keepends=True)
    for day, part in enumerate((lines[:2000], lines[2000:4000], lines[4000:]), start=1):
        (folder / f"day_{day}.txt").write_text("".join(part))
    assert call("preprocess", "--input", folder / "day_1.txt", "--output", folder / "day_1", "--min-count", 1) == 0
    for day in (2, 3):
        known, log = folder / f"day_{day - 1}", folder / f"day_{day}.txt"
        assert call("transform", "--data", known, "--input", log, "--extend", "--output", folder / f"day_{day}") == 0
    assert call("preprocess", "--input", folder / "day_2.txt", "--output", folder / "other") == 0
    return folder


def trained(config_file: Path, data: Path, output: Path, *options: object) -> Path:
    assert call("train", "--config", config_file, f"data.path={data}", f"output={output}", *options) == 0
    return output


@pytest.mark.parametrize(("optimizer", "numbers"), [("adagrad", (1, 2, 3)), ("adam", (1, 3))])
def test_later_days(optimizer: str, numbers: tuple[int, ...], days: Path, config_file: Path, tmp_path: Path) -> None:
    """In turn, or with a day left out; other batches and seeds are allowed."""
    options = [*RANKS, f"optimizer.name={optimizer}", "tables.hot_rows=0.2", 'tables.dense_tables=["C26"]']
    run = trained(config_file, days / "day_1", tmp_path / "run_1", *options)
    kinds = set[str]()
    for day in numbers[1:]:
        data, output = days / f"day_{day}", tmp_path / f"run_{day}"
        changed = ["--after", run, *options, "training.keep_checkpoints=9", "data.batch_size=64", f"seed={day}"]
        later = trained(config_file, data, output, *changed)
        before, start = tensors(run), tensors(later, 0)
        assert before.keys() == start.keys()
        for name, value in before.items():
            assert start[name][tuple(map(slice, value.shape))].equal(value), name
            if name.endswith(("/sum", "/momentum1", "/exp_avg")):
                assert start[name].count_nonzero() == value.count_nonzero(), name
        assert not all(start[name].equal(value) for name, value in tensors(later).items())
        (old, _, known), (new, _, schema) = load_run(run), load_run(later)
        assert new.state_dict().keys() == old.state_dict().keys()
        old_tables, new_tables = (dict(model.named_modules()) for model in (old, new))
        for name, table in old_tables.items():
            if isinstance(table, TTTable):
                larger = new_tables[name]
                assert larger.shape.ranks == table.shape.ranks
                assert larger.num_hot_rows == table.num_hot_rows
                assert larger.shape.num_rows >= larger.num_embeddings == schema.sparse[name.rpartition(".")[2]]
                if larger.num_embeddings > table.num_embeddings:
                    kinds.add("slices" if larger.shape != table.shape else "room")
        kinds |= {"dense"} if known.sparse["C26"] < schema.sparse["C26"] else set()
        assert trained(config_file, data, output, *changed) == later  # a finished run is left alone
        run = later
    assert kinds == {"slices", "room", "dense"} or optimizer == "adam"
    assert call("evaluate", "--checkpoint", run, "--data", days / "day_3") == 0


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("other", [], "other doesn't extend the vocabularies that"),
        ("day_2", ["optimizer.name=adagrad", "tables.tt_ranks=3"], "another config than the new run (in tables, optimizer)"),
    ],
)
def test_what_does_not_follow_is_refused(
    data: str, options: list[str], message: str, days: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(config_file, days / "day_1", tmp_path / "first", "training.steps=1")
    options = [f"data.path={days / data}", f"output={tmp_path / 'next'}", *options]
    assert call("train", "--config", config_file, "--after", first, *options) == 2
    assert not (tmp_path / "next").exists()
    assert message in capsys.readouterr().err


def test_at_full_ranks_it_predicts_the_same_as_the_dense_run(dense: Path, config_file: Path, tmp_path: Path) -> None:
    large = ["tables.tt_ranks=10000", "linears.tt_ranks=10000", "linears.policy=always", f"output={tmp_path / 'full'}"]
    compressed = compress_run(dense, load_config(config_file, large))
    assert {"tt"} == {
        layer.format for layer in compression_report(compressed.model).layers if layer.kind == "table" and layer.row_shape
    }
    expected, _, _ = load_run(dense)
    compressed.model.eval()
    for batch, _ in zip(compressed.loader.batches, range(3), strict=False):
        torch.testing.assert_close(
            compressed.model(batch.dense, batch.sparse), expected(batch.dense, batch.sparse), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_training_continues_from_its_weights(
    dense: Path, config_file: Path, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "compressed"
    same = ["tables.tt_ranks=none", "tables.compression=4", f"optimizer.name={optimizer}"]
    assert call("compress", "--checkpoint", dense, "--config", config_file, "--output", run, *same) == 0
    assert "x smaller than dense" in capsys.readouterr().out
    model, _, _ = load_run(run)
    report = compression_report(model)
    budget = report.total("dense_params", kind="table") // 4
    assert 0.9 * budget < report.total("params", kind="table") <= budget
    ranks = {layer.name: layer.ranks for layer in report.layers if layer.kind == "table" and layer.format == "tt"}
    assert len(set(ranks.values())) > 1, "ranks are spread by singular values"

    start = tensors(run, 0)
    for name, value in model.state_dict().items():
        assert torch.equal(start[f"model/{name}"], value), name
    assert call("train", "--config", config_file, f"output={run}", *same) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 12


def test_mistakes_in_compressing_name_the_remedy(
    dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["compress", "--checkpoint", str(dense), "--config", str(config_file), "--output", str(tmp_path / "new")]
    for arguments, message in (
        ([*base, "tables.format=dense"], "tables.format is 'dense': compressing needs 'tt'"),
        ([*base, "model.over_arch=[16]"], "other sizes of [model]"),
        ([*base[:-1], str(dense)], "holds checkpoints already"),
        (["compress", "--checkpoint", str(tmp_path / "no"), *base[3:]], "holds no checkpoint"),
    ):
        assert call(*arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
