"""What sharded tables send is what the planner says."""

from __future__ import annotations

import pytest

from benchmarks.distributed import PROVIDERS, ShardedCase, expected, mean_sent, measure
from benchmarks.processes import run

pytestmark = pytest.mark.distributed


def test_counted_bytes_agree_with_the_formula() -> None:
    case = ShardedCase(world_size=4, batch=512, rows=20_000, dim=16)
    results = run(case.world_size, measure, case, 0, 1)
    for name in PROVIDERS:
        counted, formula = mean_sent([sent[name] for _, sent in results]), expected(case, name)
        assert sum(counted.values()) == pytest.approx(sum(formula.values()), rel=0.02), name
        assert counted.get("all-reduce", 0) == pytest.approx(formula["formula, gradients"], rel=0.01), name
