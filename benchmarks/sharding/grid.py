"""Where copying cores beats moving bags: the planner's estimates and choice for grids of batch, dim, TT rank and GPUs.

There are as many equal tables as GPUs, so table-wise sharding is balanced. Nothing is measured: the rates are `scale_model`'s.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption

import comera_rec as cr
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.sharding.scale_model import ATTAINED, GPUS_PER_NODE, HBM, NETWORK, NVLINK
from comera_rec.recsys.sharding.parts import SHARDING_TYPES
from comera_rec.recsys.sharding.planner import TTEnumerator

PICKED = "TTShardingPlanner"


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """Equal tables, one per GPU, with one id per bag."""

    gpus: int
    batch: int
    """Samples of each GPU."""
    dim: int
    rank: int
    rows: int = 1_000_000
    dtype: str = "float32"

    def configs(self) -> list[cr.TTEmbeddingBagConfig]:
        return [
            cr.TTEmbeddingBagConfig(
                name=f"t{k}", num_embeddings=self.rows, embedding_dim=self.dim, feature_names=[f"f{k}"], tt_ranks=self.rank
            )
            for k in range(self.gpus)
        ]

    def shapes(self) -> dict[str, Any]:
        smaller = round(self.rows * self.dim / self.configs()[0].tt_shape().num_params)
        sizes = {"gpus": self.gpus, "batch": self.batch, "dim": self.dim, "rank": self.rank, "rows": self.rows}
        return {**sizes, "smaller": smaller}


def cases(quick: bool) -> list[GridCase]:
    """Two GPUs, one node, and two nodes."""
    gpus, batches, dims, ranks = [2, 8, 16], [64 << k for k in range(0, 11, 2)], [16, 64, 128], [8, 32, 128]
    if quick:
        gpus, batches, dims, ranks = [2], [64, 65_536], [64], [8]
    return [GridCase(gpus=g, batch=b, dim=d, rank=r) for g, d, r, b in product(gpus, dims, ranks, batches)]


def topology(gpus: int) -> Topology:
    """A topology of H100s, eight per node."""
    return Topology(
        gpus,
        "cuda",
        hbm_cap=80 << 30,
        local_world_size=min(gpus, GPUS_PER_NODE),
        hbm_mem_bw=HBM * ATTAINED / 1e3,  # bytes per ms
        intra_host_bw=NVLINK * ATTAINED / 1e3,
        inter_host_bw=NETWORK * ATTAINED / 1e3,
    )


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each way of sharding all tables, and one for the chosen plan, which may mix them."""
    model = "the planner's estimates for H100s, nothing measured"
    for case, rows in each_case("sharding-grid", cases(settings.quick), settings, machine=model, threads=0):
        estimates, placed = estimate(case)
        yield rows("estimate", "ms", {name: [value] for name, value in estimates.items()}, {PICKED: dict(placed)})


def estimate(case: GridCase) -> tuple[dict[str, float], Counter[str]]:
    """Estimated ms of a step's tables by way of sharding and for the plan, and how many tables the plan shards in each way."""
    logging.disable(logging.WARNING)  # TorchRec warns about every table without a sharding spec
    model = nn.Sequential(cr.TTEmbeddingBagCollection(case.configs(), device="meta"))
    devices, sharders = topology(case.gpus), [cr.TTEmbeddingBagCollectionSharder()]
    options = TTEnumerator(devices, case.batch).enumerate(model, list(sharders))
    alike = {kind: _slowest(case, [option for option in options if option.sharding_type == kind]) for kind in SHARDING_TYPES}
    planner = cr.TTShardingPlanner(devices, case.batch, stats=[])
    planner.plan(model, list(sharders))
    logging.disable(logging.NOTSET)
    best = planner._best_plan
    assert best is not None
    return {**alike, PICKED: planner._perf_model.rate(best)}, Counter(option.sharding_type for option in best)


def _slowest(case: GridCase, options: Sequence[ShardingOption]) -> float:
    """Estimate the slowest GPU's time; each GPU has a shard of every table, or one table."""
    perfs = [shard.perf.total for option in options for shard in option.shards if shard.perf is not None]
    return sum(perfs) / case.gpus
