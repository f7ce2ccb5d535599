"""MLPerf's model at its original sizes: the numbers that its rows claim, and the range of ids."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.ids import draw_ids, draw_power_law
from benchmarks.harness.measure import Settings
from benchmarks.mlperf import BAGS, PARTS, ROWS, STEP, cases, run


def test_the_sizes_are_mlperfs() -> None:
    assert (len(ROWS), sum(ROWS), sum(BAGS), max(BAGS)) == (26, 204_184_588, 214, 100)
    case = cases(quick=False)[0]
    assert (case.batch, sum(case.rows.values())) == (8192, sum(ROWS))
    model = case.config().model
    assert (model.dense_arch, model.embedding_dim, model.over_arch) == ((512, 256), 128, (1024, 1024, 512, 256))
    assert (model.architecture, model.cross_layers, model.cross_rank) == ("dcn", 3, 512)


@pytest.mark.parametrize("rows", [2, 3, 1000, 40_000_000])
def test_ids_follow_a_power_law(rows: int) -> None:
    torch.manual_seed(0)
    ids = draw_power_law(rows, 200_000, 1.05)
    assert (int(ids.min()), ids.dtype) == (0, torch.int64)
    assert int(ids.max()) < rows
    if rows == 1000:  # the continuous law is flatter among the first few ids, and much the same beyond
        for first, last in ((0, 10), (10, 100), (100, 1000)):
            shares = [((drawn >= first) & (drawn < last)).double().mean() for drawn in (ids, draw_ids(rows, 200_000, 1.05))]
            assert abs(shares[0] - shares[1]) < 0.1, (first, last, shares)


def test_rows_of_a_quick_run() -> None:
    [rows] = run(Settings(quick=True))
    assert [row.provider for row in rows[:-1]] == [*PARTS, STEP]
    parts = sum(row.p50 for row in rows[: len(PARTS)])
    assert parts == pytest.approx(rows[len(PARTS)].p50, rel=0.01), "medians of two steps add up"
    assert rows[-1].unit == "MiB"
    assert rows[-1].p50 > rows[-1].counted["table_mib"]
