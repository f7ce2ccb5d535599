"""Metrics agree with their definitions; several labels with one loss each, and weights of rows: in losses, metrics and scores."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run as run_processes
from refusals import refuse
from torch import Tensor

from comera_rec.data import ParquetBatches
from comera_rec.serving.package import ServingModel
from comera_rec.training.config import load_config
from comera_rec.training.evaluation import BinaryMetrics, mean_of_tasks
from comera_rec.training.trainer import Trainer
from data_pipeline.schema import Kind
from tests.conftest import RUN
from tests.data_pipeline.random_logs import make, schema_of
from tests.training.run_folders import call


def metrics_of(logits: list[float] | Tensor, labels: list[int] | Tensor) -> dict[str, float | int]:
    metrics = BinaryMetrics()
    metrics.update(torch.as_tensor(logits, dtype=torch.float32), torch.as_tensor(labels))
    return metrics.compute()


def auc_by_pairs(logits: list[float], labels: list[int]) -> float:
    """The share of (positive, negative) pairs that the logits order correctly; a tie counts half."""
    pairs = [(p, n) for p, y in zip(logits, labels, strict=True) if y for n, z in zip(logits, labels, strict=True) if not z]
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


def logloss(logits: list[float], labels: list[int]) -> float:
    probabilities = [1 / (1 + math.exp(-x)) for x in logits]
    return -sum(math.log(p if y else 1 - p) for p, y in zip(probabilities, labels, strict=True)) / len(labels)


# Eighths are exact in float32, and repeat often enough for ties.
rows = st.lists(st.tuples(st.integers(-40, 40).map(lambda n: n / 8), st.integers(0, 1), st.integers(0, 3)), max_size=40)


@settings(max_examples=40)
@given(rows)
def test_definitions(rows: list[tuple[float, int, int]]) -> None:
    """A row of weight n counts as n rows, and batches add up."""
    rows += [(0.125, 0, 2), (-3.0, 1, 1)]  # both classes
    logits, labels = ([row[k] for row in rows for _ in range(row[2])] for k in range(2))
    q = sum(labels) / len(labels)
    loss = logloss(logits, labels)
    expected = {"auc": auc_by_pairs(logits, labels), "logloss": loss, "ne": loss / -(q * math.log(q) + (1 - q) * math.log(1 - q))}
    assert metrics_of(logits, labels) == pytest.approx(expected | {"rows": len(labels)}, rel=1e-12)
    weighted = BinaryMetrics()
    for batch in (rows[:-2], rows[-2:]):
        logit, label, weight = torch.tensor(batch, dtype=torch.float32).reshape(-1, 3).unbind(1)
        weighted.update(logit.unsqueeze(1).requires_grad_(), label, weight)
    assert weighted.compute() == pytest.approx(expected | {"rows": len(rows)}, rel=1e-12)


def test_confident_logits_keep_their_order() -> None:
    # In float32 sigmoid(20) and sigmoid(30) are both 1, and logits within 0..1 look like probabilities.
    assert metrics_of([30.0, 20.0], [1, 0])["auc"] == 1
    assert metrics_of([0.5, 0.5], [1, 0])["logloss"] == pytest.approx(logloss([0.5, 0.5], [1, 0]), rel=1e-12)


def test_undefined() -> None:
    refuse("no rows to evaluate", BinaryMetrics().compute)
    refuse("all 3 labels are 0, so AUC and NE are undefined; evaluate on more rows", metrics_of, [1.0, 2.0, 3.0], [0, 0, 0])
    refuse("all 1 labels are 1", metrics_of, [1.0], [1])
    refuse("2 of 3 logits are not finite", metrics_of, [math.nan, 2.0, math.inf], [0, 1, 0])
    weightless = BinaryMetrics()
    weightless.update(torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2))
    refuse("all 2 weights are 0, so AUC and NE are undefined", weightless.compute)
    weightless.update(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([1e-20, 1.0]))
    assert weightless.compute()["ne"] > 1


def test_metrics_of_several_labels_are_means_over_those_of_both_classes() -> None:
    one, two, rare = (BinaryMetrics() for _ in range(3))
    for metrics, labels in ((one, [0, 1, 0, 1]), (two, [1, 0, 0, 1]), (rare, [0, 0, 0, 0])):
        metrics.update(torch.arange(4.0), torch.tensor(labels))
    assert mean_of_tasks({"label": one}) == one.compute()
    means = mean_of_tasks({"a": one, "rare": rare, "b": two})
    assert means.keys() == {"rows"} | {f"{name}{label}" for name in ("auc", "ne", "logloss") for label in ("", "_a", "_b")}
    assert (means["auc_a"], means["auc_b"], means["auc"], means["rows"]) == (0.75, 0.5, 0.625, 4)
    refuse("all 4 labels are 0", mean_of_tasks, {"a": rare})


def example() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 10).sin(), torch.arange(10) % 3 == 1


def compute(rank: int) -> dict[str, float | int]:
    metrics = BinaryMetrics()
    metrics.update(*(part[:3] if rank == 0 else part[3:] for part in example()))
    return metrics.compute()


@pytest.mark.distributed
def test_processes_with_unequal_rows_get_the_metrics_of_all_rows() -> None:
    for computed in run_processes(2, compute):
        assert computed == pytest.approx(metrics_of(*example()), rel=1e-12)


ROWS = 3000
KINDS: dict[str, Kind] = {"click": "label", "buy": "label", "importance": "weight"}
KINDS |= {"price": "integer", "item": "category", "user": "category"}


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
    make(folder / "log.csv", folder / "data", schema=schema_of(KINDS, format="csv"), min_count=1)
    (folder / "run.toml").write_text(RUN.format(output=folder / "run", data=folder / "data"))
    return folder


def trainer(folder: Path, output: Path, *overrides: str) -> Trainer:
    return Trainer(load_config(folder / "run.toml", (f"output={output}", "linears.format=dense", *overrides)))


def test_a_loss_is_the_weighted_mean_of_its_tasks_and_rows(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path / "run", "training.task_weights=[3, 1]")
    batch = next(iter(run.loader))
    with torch.no_grad():
        logits = run.model(batch.dense, batch.sparse)
        loss = run.step.loss_of(batch)
    click, buy = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").unbind(1)
    torch.testing.assert_close(loss, (batch.weights * (1.5 * click + 0.5 * buy)).mean() / 2)


@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_every_architecture_learns_both_labels(folder: Path, tmp_path: Path, architecture: str) -> None:
    rates = ["optimizer.lr_dense=0.02", "optimizer.lr_cores=0.02", "optimizer.lr_tables=0.1", "training.steps=40"]
    result = trainer(folder, tmp_path / "run", *rates, f"model.architecture={architecture}").train()
    for name in ("auc", "ne", "logloss"):
        assert result[name] == pytest.approx((result[f"{name}_click"] + result[f"{name}_buy"]) / 2)
    assert result["rows"] == ROWS // 10
    assert min(result["auc_click"], result["auc_buy"]) > 0.65


def test_scores_have_a_column_for_each_label(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(folder, tmp_path / "run", "tables.format=dense")
    run.train()
    data, checkpoint, model, output = folder / "data", *(tmp_path / name for name in ("run", "model.pt2", "scores.parquet"))
    assert call("export", "--checkpoint", checkpoint, "--output", model) == 0
    assert call("score", "--model", model, "--input", data, "--output", output) == 0
    assert call("evaluate", "--checkpoint", checkpoint, "--data", data) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    scores = pq.read_table(output)
    assert scores.column_names == ["row", "score_click", "score_buy", "click", "buy"]
    metadata = ServingModel(model).metadata.run
    assert metadata.labels == ("click", "buy")
    assert metadata.ne == pytest.approx(evaluated["ne"], rel=1e-6)
    batch = next(iter(ParquetBatches(data, "test", batch_size=ROWS)))
    with torch.no_grad():
        expected = run.model.eval()(batch.dense, batch.sparse).sigmoid()
    actual = np.stack([scores["score_click"].to_numpy(), scores["score_buy"].to_numpy()], axis=1)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)
    pytest.importorskip("onnxruntime")
    assert call("export", "--checkpoint", checkpoint, "--output", tmp_path / "model.onnx") == 0, "whose numbers are compared"
