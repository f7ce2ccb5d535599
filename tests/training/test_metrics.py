"""Metrics agree with their definitions in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run as run_processes
from torch import Tensor

from comera_rec.training.metrics import BinaryMetrics, OneClass, mean_of_tasks


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


@settings(deadline=None, max_examples=40)
@given(rows)
def test_definitions(rows: list[tuple[float, int, int]]) -> None:
    """A row of weight n counts as n rows."""
    rows += [(0.125, 0, 2), (-3.0, 1, 1)]  # both classes
    logits, labels = ([row[k] for row in rows for _ in range(row[2])] for k in range(2))
    q = sum(labels) / len(labels)
    loss = logloss(logits, labels)
    expected = {"auc": auc_by_pairs(logits, labels), "logloss": loss, "ne": loss / -(q * math.log(q) + (1 - q) * math.log(1 - q))}
    assert metrics_of(logits, labels) == pytest.approx(expected | {"rows": len(labels)}, rel=1e-12)
    weighted = BinaryMetrics()
    weighted.update(*(torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)))
    assert weighted.compute() == pytest.approx(expected | {"rows": len(rows)}, rel=1e-12)


def test_batches_add_up() -> None:
    logits, labels = torch.randn(1000), (torch.rand(1000) < 0.3).float()
    metrics = BinaryMetrics()
    for part, of_part in zip(logits.split(300), labels.split(300), strict=True):
        metrics.update(part.unsqueeze(1).requires_grad_(), of_part)
    assert metrics.compute() == metrics_of(logits, labels)


def test_confident_logits_keep_their_order() -> None:
    # In float32 sigmoid(20) and sigmoid(30) are both 1, and logits within 0..1 look like probabilities.
    assert metrics_of([30.0, 20.0], [1, 0])["auc"] == 1
    assert metrics_of([0.5, 0.5], [1, 0])["logloss"] == pytest.approx(logloss([0.5, 0.5], [1, 0]), rel=1e-12)


def test_undefined() -> None:
    with pytest.raises(ValueError, match="no rows to evaluate"):
        BinaryMetrics().compute()
    with pytest.raises(ValueError, match="all 3 labels are 0, so AUC and NE are undefined; evaluate on more rows"):
        metrics_of([1.0, 2.0, 3.0], [0, 0, 0])
    with pytest.raises(ValueError, match="all 1 labels are 1"):
        metrics_of([1.0], [1])
    with pytest.raises(ValueError, match="2 of 3 logits are not finite"):
        metrics_of([math.nan, 2.0, math.inf], [0, 1, 0])
    weightless = BinaryMetrics()
    weightless.update(torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2))
    with pytest.raises(ValueError, match="all 2 weights are 0, so AUC and NE are undefined"):
        weightless.compute()
    with pytest.raises(ValueError, match=r"logits and labels must match in size, got \(2, 1\) and \(3,\)"):
        BinaryMetrics().update(torch.zeros(2, 1), torch.zeros(3))


def collected(labels: list[int]) -> BinaryMetrics:
    metrics = BinaryMetrics()
    metrics.update(torch.arange(len(labels)).float(), torch.tensor(labels))
    return metrics


def test_metrics_of_several_labels_are_means_over_those_of_both_classes() -> None:
    one, two, rare = collected([0, 1, 0, 1]), collected([1, 0, 0, 1]), collected([0, 0, 0, 0])
    assert mean_of_tasks({"label": one}) == one.compute()
    means = mean_of_tasks({"a": one, "rare": rare, "b": two})
    assert means.keys() == {"rows"} | {f"{name}{label}" for name in ("auc", "ne", "logloss") for label in ("", "_a", "_b")}
    assert (means["auc_a"], means["auc_b"], means["auc"], means["rows"]) == (0.75, 0.5, 0.625, 4)
    with pytest.raises(OneClass, match="all 4 labels are 0"):
        mean_of_tasks({"a": rare})


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
