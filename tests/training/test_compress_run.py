"""A trained dense run becomes the start of a compressed run: nearly equal at full ranks, within the budget, and trainable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comera_rec.convert import compression_report
from comera_rec.training.config import load_config
from comera_rec.training.from_runs import compress_run
from comera_rec.training.runs import load_run
from comera_rec.training.trainer import Trainer
from tests.training.run_folders import call


@pytest.fixture
def dense(config_file: Path, tmp_path: Path) -> Path:
    """A dense run of twelve steps."""
    run = tmp_path / "dense"
    assert call("train", "--config", config_file, f"output={run}", "tables.format=dense", "linears.format=dense") == 0
    return run


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

    trainer = Trainer(load_config(config_file, [*same, f"output={run}"]))
    trainer._resume()
    for name, value in model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    assert call("train", "--config", config_file, f"output={run}", *same) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 12


def test_mistakes_name_the_remedy(dense: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
