"""Sharded tables send as many bytes as the planner says; at high compression, copied cores send far less than bags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.sharding.collectives import mean_sent
from benchmarks.sharding.distributed import DENSE, PROVIDERS, Inputs, Provider, ShardedCase, expected, measure
from benchmarks.sharding.distributed import cases as benchmark_cases
from benchmarks.sharding.distributed import run as run_benchmark
from comera_rec.testing import run

pytestmark = pytest.mark.distributed

COPIES = "TT data-parallel"
LARGE = ShardedCase(world_size=4, batch=32_768)


@pytest.fixture(scope="module")
def counted() -> tuple[ShardedCase, dict[str, dict[str, float]]]:
    """Bytes by provider and collective, of `LARGE` with 50 times fewer rows."""
    case = replace(LARGE, batch=655, rows=20_000, rank=1)
    results = run(case.world_size, measure, case, 0, 1)
    return case, {name: mean_sent([sent[name] for _, sent in results]) for name in PROVIDERS}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_counted_bytes_agree_with_the_formula_in_every_collective(
    provider: str, counted: tuple[ShardedCase, dict[str, dict[str, float]]]
) -> None:
    case, sent = counted
    formula = expected(case, provider)
    assert set(sent[provider]) <= {*formula, "all-to-all"}
    for collective, size in formula.items():
        # Besides these, processes send each other sizes.
        assert sent[provider][collective] == pytest.approx(size, rel=0.01, abs=200), collective


def test_at_500x_copies_send_at_least_four_times_less_than_dense_bags(
    counted: tuple[ShardedCase, dict[str, dict[str, float]]],
) -> None:
    assert LARGE in benchmark_cases(quick=False)
    small, sent = counted
    for case in (LARGE, small):
        assert case.shapes()["smaller"] >= 500
        assert case.dim == 64
        assert 4 * sum(expected(case, COPIES).values()) <= sum(expected(case, DENSE).values())
    assert 4 * sum(sent[COPIES].values()) <= sum(sent[DENSE].values())


def test_a_quick_run_has_a_row_for_each_way_of_sharding() -> None:
    [rows] = run_benchmark(Settings(quick=True))
    assert [row.provider for row in rows] == list(PROVIDERS)
    assert "sent, reduce-scatter" in rows[-1].counted


def test_a_wrong_number_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="Disagreement: TT table-wise: gradient of core_1 is off by"):
        run(2, measure_wrong)


def measure_wrong(rank: int) -> None:
    """Measure with one process whose gradients differ from the reference."""
    case = ShardedCase(world_size=2, batch=16, rows=500, dim=8, rank=2)
    inputs = Inputs(case, 0)
    reference = inputs.reference()
    reference["gradient of core_1"] *= 1.01
    Provider(case, "TT table-wise", inputs).verify(reference)
