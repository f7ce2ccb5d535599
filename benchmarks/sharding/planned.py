"""`TTShardingPlanner`'s estimates for a TT table, and measurements: memory of a process and time of a step.

Memory is the growth of the fullest process's resident peak while the table is built, sharded and trained by Adam for two steps.
Times are the slowest process's. The planner gets this machine's copy bandwidth for both memory and network, which are the same
under gloo. It assumes that each process has its own cores, but here they share them.

Shapes: W processes, B bags of one id per process, N embedding_dim.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import Topology

import comera_rec as cr
from benchmarks.harness.environment import available_cores
from benchmarks.harness.ids import draw_power_law
from benchmarks.harness.limits import ceilings
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.memory import memory_is_measurable, resident_peak, return_freed_memory_at_once
from benchmarks.harness.rows import Row
from benchmarks.lookup.criteo_tables import ZIPF, PooledValues
from benchmarks.sharding.distributed import sharded_model
from comera_rec.recsys.sharding.parts import SHARDING_TYPES
from comera_rec.recsys.sharding.planner import TTEnumerator
from comera_rec.testing import run as run_processes


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One table on several processes; one id per bag, drawn by Zipf's law."""

    world_size: int
    batch: int = 32_768
    rows: int = 5_000_000
    dim: int = 64
    rank: int = 128
    dtype: str = "float32"

    def model(self) -> PooledValues:
        """Build a collection of only this table, on the meta device."""
        table = cr.TTEmbeddingBagConfig(
            name="t", num_embeddings=self.rows, embedding_dim=self.dim, feature_names=["f"], tt_ranks=self.rank
        )
        return PooledValues(cr.TTEmbeddingBagCollection([table], device="meta"))

    def topology(self, bandwidth: float) -> Topology:
        """Describe the processes to the planner, with a bandwidth in bytes per second."""
        rate = bandwidth / 1e3
        return Topology(self.world_size, "cpu", ddr_cap=1 << 40, ddr_mem_bw=rate, intra_host_bw=rate, inter_host_bw=rate)

    def shapes(self) -> dict[str, Any]:
        sizes = {"processes": self.world_size, "cores": available_cores(), "rows": self.rows, "dim": self.dim}
        return {**sizes, "rank": self.rank, "batch": self.batch}


def cases(quick: bool) -> list[PlannedCase]:
    """A table whose state is larger than a batch's rows, and one whose state is smaller."""
    if quick:
        return [PlannedCase(world_size=2, batch=8192, rows=500_000)]
    few = [PlannedCase(world_size=world) for world in (1, 2, 4)]
    return [*few, *(replace(case, batch=131_072, rank=16) for case in few)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield rows of memory and time for each way of sharding; `counted` has the planner's estimates."""
    if not memory_is_measurable("cpu"):
        raise ValueError("peak memory can't be reset on this system: run planned on Linux")
    bandwidth = ceilings("cpu").bytes_per_s
    for case, rows in each_case("planned", cases(settings.quick), settings, threads=1):
        counted = expected(case, bandwidth)
        results = run_processes(case.world_size, measure, case, settings.seed, 3 if settings.quick else 10)
        mib = {kind: [max(of[kind][0] for of in results)] for kind in SHARDING_TYPES}
        ms = {kind: [max(turn) for turn in zip(*(of[kind][1] for of in results), strict=True)] for kind in SHARDING_TYPES}
        yield rows("run", "MiB", mib, counted) + rows("step", "ms", ms, counted)


def expected(case: PlannedCase, bandwidth: float) -> dict[str, dict[str, float]]:
    """Sharding type -> the planner's MiB of the fullest process and ms of the slowest."""
    options = TTEnumerator(case.topology(bandwidth), case.batch).enumerate(case.model(), [cr.TTEmbeddingBagCollectionSharder()])
    return {
        option.sharding_type: {
            "planned_mib": max(shard.storage.ddr for shard in option.shards) / 2**20,
            "planned_ms": max(shard.perf.total for shard in option.shards),
        }
        for option in options
    }


def measure(rank: int, case: PlannedCase, seed: int, rounds: int) -> dict[str, tuple[float, list[float]]]:
    """Measure in each process: sharding type -> MiB, and ms of the steps."""
    return_freed_memory_at_once()
    train(replace(case, rows=10_000, batch=64, rank=2), SHARDING_TYPES[0], seed, 1)  # load what the very first step loads
    outcome = {}
    for kind in SHARDING_TYPES:
        mib = resident_peak(partial(_two_steps, case, kind, seed), 0)
        outcome[kind] = mib, train(case, kind, seed, rounds)
    return outcome


def _two_steps(case: PlannedCase, kind: str, seed: int, turn: int) -> object:
    return train(case, kind, seed, 1)


def train(case: PlannedCase, kind: str, seed: int, rounds: int) -> list[float]:
    """Time steps in milliseconds, after a first one in which optimizers create their state."""
    torch.manual_seed(seed + dist.get_rank())
    ids = draw_power_law(case.rows, case.batch, ZIPF)
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(case.batch, dtype=torch.int64))
    model = sharded_model(case.model(), kind, case.topology(1e10), case.batch, [cr.TTEmbeddingBagCollectionSharder()])
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, fused=True) if parameters else None  # a process may hold no parameters
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        model(features).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:]
