"""The benchmark of a whole DLRM: models have the sizes that their rows claim, and finished runs aren't repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import dlrm
from benchmarks.harness.measure import Settings


@pytest.mark.slow
def test_a_run_has_the_size_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    form = "TT + rows adaptive"
    monkeypatch.setattr(dlrm, "FORMS", {form: dlrm.FORMS[form]})
    settings = Settings(quick=True)
    rows = [row for (row,) in dlrm.run(settings)]
    assert [row.shapes["data"] for row in rows] == [size.data for size in dlrm.QUICK]
    for row in rows:
        assert row.counted["best_ne"] < row.p50
        assert row.counted["bytes"] <= row.counted["dense_bytes"] / 20
    assert rows[0].counted["bytes"] > 0.99 * rows[0].counted["dense_bytes"] / 20
    assert rows[0].counted["kept_ids"] < rows[1].counted["kept_ids"]
    assert not list(dlrm.run(replace(settings, finished=rows)))
