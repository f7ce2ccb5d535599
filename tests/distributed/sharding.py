"""Models sharded over the processes of a test."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv

import comera_rec as cr
from comera_rec.recsys.sharding import TTManagedCollisionEmbeddingBagCollectionSharder


def shard(
    model: nn.Module, kinds: Any = None, *, batch: int = 8, fused: Any = None, group: dist.ProcessGroup | None = None
) -> DistributedModelParallel:
    """Plan on CPU and wrap a model.

    Args:
        model: with collections of ours.
        kinds: the sharding type of tables, by name; the planner's choice for others.
        batch: samples of each process.
        fused: settings of the optimizer of dense tables.
        group: the processes, all by default.
    """
    group = group or dist.distributed_c10d._get_default_group()
    dense_sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    managed = TTManagedCollisionEmbeddingBagCollectionSharder(dense_sharder)
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder(dense_sharder), managed]
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in (kinds or {}).items()}
    planner = cr.TTShardingPlanner(Topology(group.size(), "cpu"), batch, constraints=constraints, stats=[])
    env = ShardingEnv(group.size(), group.rank())
    env.process_group = group  # not `from_process_group`: its mesh needs all processes, whatever the group
    return DistributedModelParallel(model, env, plan=planner.collective_plan(model, sharders, group), sharders=sharders)
