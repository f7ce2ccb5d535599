"""Several labels with one loss each, and weights of rows: in the loss, in metrics, in every architecture, and in scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from comera_rec.data import ParquetBatches
from comera_rec.serving.package import ServingModel
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import read_schema
from tests.conftest import RUN
from tests.training.run_folders import call

ROWS = 3000
SCHEMA = """
separator = ","
[columns]
click = "label"
buy = "label"
importance = "weight"
price = "integer"
item = "category"
user = "category"
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `log.csv`, `data`, and `run.toml` for a small run."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = np.random.default_rng(0)
    item, user = draw.zipf(1.3, ROWS) % 400, draw.zipf(1.2, ROWS) % 900
    click, buy = (draw.random(ROWS) < 0.1 + 0.8 * (item % 3 == 0)), (draw.random(ROWS) < 0.1 + 0.8 * (user % 2))
    weight, price = draw.integers(0, 5, ROWS) / 4, draw.integers(0, 90, ROWS)
    columns = zip(click.astype(int), buy.astype(int), weight, price, item, user, strict=True)
    (folder / "log.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in columns))
    (folder / "schema.toml").write_text(SCHEMA)
    schema = read_schema(folder / "schema.toml")
    preprocess(PreprocessOptions(inputs=(folder / "log.csv",), output=folder / "data", schema=schema, min_count=1))
    (folder / "run.toml").write_text(RUN.format(output=folder / "run", data=folder / "data"))
    return folder


def trainer(folder: Path, output: Path, *overrides: str) -> Trainer:
    return Trainer(load_config(folder / "run.toml", (f"output={output}", "linears.format=dense", *overrides)))


def test_a_loss_is_the_weighted_mean_of_its_tasks_and_rows(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path / "run", "training.task_weights=[3, 1]")
    batch = next(iter(run.loader))
    assert batch.weights is not None
    with torch.no_grad():
        logits = run.model(batch.dense, batch.sparse)
        loss = run.step.loss_of(batch)
    click, buy = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").unbind(1)
    torch.testing.assert_close(loss, (batch.weights * (1.5 * click + 0.5 * buy)).mean() / 2)


@pytest.mark.parametrize(
    "architecture",
    [
        ["model.architecture=dlrm"],
        ["model.architecture=dcn"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_architecture_learns_both_labels(folder: Path, tmp_path: Path, architecture: list[str]) -> None:
    rates = ["optimizer.lr_dense=0.02", "optimizer.lr_cores=0.02", "optimizer.lr_tables=0.1", "training.steps=40"]
    result = trainer(folder, tmp_path / "run", *rates, *architecture).train()
    for name in ("auc", "ne", "logloss"):
        assert result[name] == pytest.approx((result[f"{name}_click"] + result[f"{name}_buy"]) / 2)
    assert result["rows"] == ROWS // 10
    assert min(result["auc_click"], result["auc_buy"]) > 0.65


def test_scores_have_a_column_for_each_label(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(folder, tmp_path / "run", "tables.format=dense")
    run.train()
    written = (tmp_path / name for name in ("run", "model.pt2", "scores.parquet"))
    data, checkpoint, model, output = map(str, (folder / "data", *written))
    for command in (
        ["export", "--checkpoint", checkpoint, "--output", model],
        ["score", "--model", model, "--input", data, "--output", output],
        ["evaluate", "--checkpoint", checkpoint, "--data", data],
    ):
        assert call(*command) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores.column_names == ["row", "score_click", "score_buy", "click", "buy"]
    metadata = ServingModel(tmp_path / "model.pt2").metadata.run
    assert metadata is not None
    assert metadata.labels == ("click", "buy")
    assert metadata.ne == pytest.approx(evaluated["ne"], rel=1e-6)
    batch = next(iter(ParquetBatches(folder / "data", "test", batch_size=ROWS)))
    with torch.no_grad():
        expected = run.model.eval()(batch.dense, batch.sparse).sigmoid()
    actual = np.stack([scores["score_click"].to_numpy(), scores["score_buy"].to_numpy()], axis=1)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)
