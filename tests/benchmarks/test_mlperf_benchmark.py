"""MLPerf's model at its original sizes: the numbers that its rows claim, and the range of ids."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.ids import draw_ids, draw_power_law


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
