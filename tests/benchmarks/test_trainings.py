"""Whole trainings: rates are tried until the best lies inside, other seeds use it, and finished runs are not repeated."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.harness.trainings import Trained, at_best_rate, best_rate, train_all

CASES = [({"method": "a", "dim": 4}, (0.01, 0.02, 0.03)), ({"method": "b", "dim": 4}, (0.05,))]


def trained(rows: list[Row], **only: str) -> list[tuple[str, float, int]]:
    """Method, rate and seed of each run that was not finished; the best rate is 0.02."""
    runs = []

    def train(shapes: dict[str, Any], seed: int) -> Trained:
        runs.append((shapes["method"], shapes["lr"], seed))
        return 0.9 - shapes["lr"], {"val_ne": abs(shapes["lr"] - 0.02)}

    new = [row for case in train_all("dlrm", CASES, train, Settings(only=only), rows) for row in case]
    assert rows[len(rows) - len(new) :] == new
    assert [(row.provider, row.shapes["lr"], row.seed) for row in new] == runs
    return runs


def test_other_seeds_use_the_best_rate_and_finished_runs_are_not_repeated() -> None:
    rows: list[Row] = []
    first = [("a", 0.01, 0), ("a", 0.02, 0), ("a", 0.03, 0), ("b", 0.05, 0)]
    assert trained(rows) == [*first, ("a", 0.02, 1), ("b", 0.05, 1), ("a", 0.02, 2), ("b", 0.05, 2)]
    assert [row.seed for row in at_best_rate(rows) if row.provider == "a"] == [0, 1, 2]
    assert best_rate(rows, {"method": "c", "dim": 4}) is None
    assert trained(list(rows)) == []
    assert trained(rows[:5], method="b|c") == [("b", 0.05, 1), ("b", 0.05, 2)]


@pytest.mark.parametrize(("best", "further"), [(0.01, set()), (0.03, {0.1}), (0.001, {0.001, 0.0003}), (3.0, {0.1, 0.3, 1.0})])
def test_rates_are_tried_until_the_best_lies_inside(best: float, further: set[float]) -> None:
    def train(shapes: dict[str, Any], seed: int) -> Trained:
        return 1.0, {"val_ne": abs(math.log(shapes["lr"] / best))}

    rows: list[Row] = []
    cases = [({"method": "dense"}, (0.003, 0.01, 0.03))]
    list(train_all("quality", cases, train, Settings(), rows, more_rates=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)))
    assert {row.shapes["lr"] for row in rows if row.seed == 0} == {0.003, 0.01, 0.03, *further}
    assert {row.shapes["lr"] for row in rows if row.seed > 0} == {min(best, 1.0)}


def test_an_impossible_case_is_left_out() -> None:
    rows: list[Row] = []
    assert list(train_all("dlrm", CASES, lambda shapes, seed: None, Settings(), rows)) == rows == []
