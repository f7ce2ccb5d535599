"""Configs: defaults, overrides, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from comera_rec.training.config import load_config, parse_config
from comera_rec.training.model import Schema

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
