"""The planner chooses the plan that is cheapest by its own estimates."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption

import comera_rec as cr
from benchmarks.harness.measure import Settings
from benchmarks.plot import plot_rows
from benchmarks.sharding.grid import PICKED, GridCase, estimate, run, topology
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding.parts import SHARDING_TYPES
from comera_rec.recsys.sharding.planner import TTEnumerator

BATCHES, DIMS, RANKS, WORLDS = (32, 1024, 32_768), (16, 128), (4, 64), (1, 2, 4, 16)


def table(name: str, rows: int, dim: int, rank: int) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], tt_ranks=rank)


def placements(option: ShardingOption, world_size: int) -> list[dict[int, float]]:
    """Time by device, for each way of placing an option."""
    times = [shard.perf.total for shard in option.shards]
    if option.sharding_type == "table_wise":
        return [{device: times[0]} for device in range(world_size)]
    return [dict(enumerate(times))]


def cheapest(options: list[ShardingOption], world_size: int) -> float:
    """Cost of the cheapest plan, by trying every option of every table on every device."""
    of_tables = defaultdict(list)
    for option in options:
        of_tables[option.name] += placements(option, world_size)
    return min(
        max(sum(placed.get(device, 0.0) for placed in plan) for device in range(world_size))
        for plan in product(*of_tables.values())
    )


def chosen(model: nn.Module, devices: Topology, batch: int) -> tuple[float, set[str]]:
    planner = cr.TTShardingPlanner(devices, batch, stats=[])
    planner.plan(model, [cr.TTEmbeddingBagCollectionSharder()])
    plan = planner._best_plan
    return planner._perf_model.rate(plan), {option.sharding_type for option in plan}


def test_the_cheapest_plan_is_chosen_over_a_grid() -> None:
    kinds = set()
    for batch, dim, rank, world in product(BATCHES, DIMS, RANKS, WORLDS):
        tables = [table("large", 3_000_000, dim, rank), table("small", 20_000, dim, rank)]
        model = nn.Sequential(TTEmbeddingBagCollection(tables, device="meta"))
        devices = topology(world)
        options = TTEnumerator(devices, batch).enumerate(model, [cr.TTEmbeddingBagCollectionSharder()])
        rating, chosen_kinds = chosen(model, devices, batch)
        assert rating == pytest.approx(cheapest(options, world), rel=1e-9), (batch, dim, rank, world)
        kinds |= chosen_kinds
    assert {"data_parallel", "table_wise"} <= kinds  # the grid covers both choices


@pytest.mark.parametrize("batch", [64, 65_536])
def test_the_grid_benchmark_reports_the_cheapest_way(batch: int) -> None:
    estimates, placed = estimate(GridCase(gpus=4, batch=batch, dim=64, rank=8))
    assert set(estimates) == {*SHARDING_TYPES, PICKED}
    best = min(SHARDING_TYPES, key=lambda kind: estimates[kind])
    assert best == ("table_wise" if batch == 64 else "data_parallel")
    assert placed == {best: 4}
    assert estimates[PICKED] == pytest.approx(estimates[best])


def test_rows_of_a_quick_run_are_plotted(tmp_path: Path) -> None:
    rows = [row for case in run(Settings(quick=True)) for row in case]
    assert [row.counted for row in rows if row.provider == PICKED] == [{"table_wise": 2}, {"data_parallel": 2}]
    plot_rows(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
