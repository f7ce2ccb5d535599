"""The planner chooses the plan that is cheapest by its own estimates."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding.planner import TTEnumerator

# Bytes per ms of an H100, of NVLink and of a network adapter for each GPU, at six tenths of the data sheets' rates.
RATES = {"hbm_mem_bw": 2.01e9, "intra_host_bw": 2.7e8, "inter_host_bw": 3e7}
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
        devices = Topology(world, "cuda", hbm_cap=80 << 30, local_world_size=min(world, 8), **RATES)
        options = TTEnumerator(devices, batch).enumerate(model, [cr.TTEmbeddingBagCollectionSharder()])
        rating, chosen_kinds = chosen(model, devices, batch)
        assert rating == pytest.approx(cheapest(options, world), rel=1e-9), (batch, dim, rank, world)
        kinds |= chosen_kinds
    assert {"data_parallel", "table_wise"} <= kinds  # the grid covers both choices
