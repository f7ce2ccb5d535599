"""The benchmark of shapes: its rows, its check of outputs, and the fit of prices."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.measure import Settings
from benchmarks.harness.timing import Plan
from benchmarks.lookup.calibrate import TABLES, nonnegative_least_squares
from benchmarks.lookup.shapes import FULL, QUICK, ShapedTables, label, run
from comera_rec import TTEmbeddingBag, TTShape

FEW = Plan(warmup=0, min_rounds=1, max_rounds=1)


def test_a_case_reports_the_chosen_and_the_fastest_shape() -> None:
    (rows,) = run(Settings(quick=True, plan=FEW))
    (case,) = QUICK
    (choice,) = [row for row in rows if row.counted["chosen"]]
    assert choice.provider == label(TTShape.for_table(case.rows, case.dim, budget_params=case.budget))
    (ratios,) = {tuple(row.ratios) for row in rows}
    assert max(row.ratios[ratios[0]] for row in rows) == 1.0
    assert all(0.8 * case.budget < row.counted["params"] <= case.budget for row in rows)
    assert {row.counted["candidates"] for row in rows} == {len(case.candidates)}


def test_a_wrong_shape_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TTEmbeddingBag.forward
    monkeypatch.setattr(TTEmbeddingBag, "forward", lambda *args: forward(*args) * 1.01)
    (case,) = QUICK
    with pytest.raises(Disagreement, match=r"shapes, .*'compression': 50.*output is off"):
        ShapedTables(case, "cpu", 0).time(case.candidates, FEW)


def test_calibration_and_benchmark_use_different_tables() -> None:
    assert not {(case.rows, case.dim) for case in FULL} & {(case.rows, case.dim) for case in TABLES}


def test_least_squares_are_found_and_stay_nonnegative() -> None:
    matrix = np.random.default_rng(0).uniform(0.1, 1.0, (50, 4)) * [1.0, 1e3, 1e-3, 0.0]
    assert nonnegative_least_squares(matrix, matrix @ [2.0, 0.0, 5.0, 0.0]) == pytest.approx([2.0, 0.0, 5.0, 0.0], abs=1e-6)
    assert nonnegative_least_squares(matrix[:, :1], -np.ones(50)) == [0.0]
