"""A run on later data starts where another one ended: known ids keep rows, ranks and optimizer state, and new ids get rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from comera_rec.nn import TTTable
from comera_rec.training.runs import load_run
from data_pipeline.manifest import read_manifest
from tests.training.run_folders import RANKS, call, tensors


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


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_three_days(optimizer: str, days: Path, config_file: Path, tmp_path: Path) -> None:
    options = [*RANKS, f"optimizer.name={optimizer}", "tables.hot_rows=0.2", 'tables.dense_tables=["C26"]']
    run = trained(config_file, days / "day_1", tmp_path / "run_1", *options)
    kinds = set[str]()
    for day in (2, 3):
        later = trained(
            config_file, days / f"day_{day}", tmp_path / f"run_{day}", "--after", run, *options, "training.keep_checkpoints=9"
        )
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
        run = later
    assert kinds == {"slices", "room", "dense"}
    assert call("evaluate", "--checkpoint", run, "--data", days / "day_3") == 0


def test_a_run_that_skips_a_day(days: Path, config_file: Path, tmp_path: Path) -> None:
    first = trained(config_file, days / "day_1", tmp_path / "first")
    third = trained(config_file, days / "day_3", tmp_path / "third", "--after", first, "data.batch_size=64", "seed=5")
    _, _, schema = load_run(third)
    assert schema.sparse["C3"] == read_manifest(days / "day_3").categorical_columns[2].num_embeddings
    assert trained(config_file, days / "day_3", third, "--after", first, "data.batch_size=64", "seed=5") == third  # finished


def test_what_does_not_follow_is_refused(days: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained(config_file, days / "day_1", tmp_path / "first")

    def refusal(data: str, *options: str) -> str:
        options = (f"data.path={days / data}", f"output={tmp_path / 'next'}", *options)
        assert call("train", "--config", config_file, "--after", first, *options) == 2
        assert not (tmp_path / "next").exists()
        return capsys.readouterr().err

    assert "other doesn't extend the vocabularies that" in refusal("other")
    assert "another config than the new run (in tables, optimizer)" in refusal(
        "day_2", "tables.tt_ranks=3", "optimizer.name=adagrad"
    )
