"""The benchmark of a whole DLRM: models have the sizes that their rows claim, and finished runs aren't repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.plot import plot_rows
from benchmarks.training import dlrm


def test_a_run_has_the_size_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, form in (("FORMS", "TT + rows adaptive"), ("OF_ARCHITECTURES", "DCN TT + rows")):
        monkeypatch.setattr(dlrm, name, {form: getattr(dlrm, name)[form]})
    settings = Settings(quick=True)
    rows = [row for (row,) in dlrm.run(settings)]
    assert [row.shapes["data"] for row in rows] == [size.data for size in dlrm.QUICK]
    assert 3 < rows[2].counted["dense_bytes"] / rows[2].counted["bytes"] < 20  # its cross network stays dense
    for row in rows:
        assert row.counted["best_ne"] < row.p50
    for row in rows[:2]:
        assert row.counted["bytes"] <= row.counted["dense_bytes"] / 20
    assert rows[0].counted["bytes"] > 0.99 * rows[0].counted["dense_bytes"] / 20
    assert rows[0].counted["kept_ids"] < rows[1].counted["kept_ids"]
    assert not list(dlrm.run(replace(settings, finished=rows)))
    plot_rows(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
