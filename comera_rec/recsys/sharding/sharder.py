"""The sharders that tell TorchRec how to shard a TTEmbeddingBagCollection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingEnv, ShardingEnv2D

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.sharding.collection import ShardedTTEmbeddingBagCollection
from data_pipeline.errors import UserError

MANAGED = "_embedding_module"  # TorchRec's name of the collection in a managed collision module


class TTEmbeddingBagCollectionSharder(ModuleSharder[TTEmbeddingBagCollection]):
    """Shards `TTEmbeddingBagCollection` under `DistributedModelParallel`: each TT table data-parallel, table-wise or row-wise.

    Data-parallel replicates a TT table and averages its gradients: no ids or bags are sent. Table-wise gives it to one
    process. Row-wise divides the leading core's slices and replicates the other cores. Dense tables of the same collection go to
    TorchRec's sharder. Plan with `TTShardingPlanner`.

    Args:
        dense_sharder: shards the dense tables; default `EmbeddingBagCollectionSharder()`. Those of a `TTEmbeddingCollection` are
            sharded by an `EmbeddingCollectionSharder` with the same settings. Its `qcomm_codecs_registry` also encodes the bags or
            rows of TT tables, and their gradients, where they are sent; gradients of replicas are averaged as they are.

    Example:
        >>> sharders = [TTEmbeddingBagCollectionSharder(), *get_default_sharders()]  # doctest: +SKIP
        >>> plan = TTShardingPlanner(topology).collective_plan(model, sharders, group)  # doctest: +SKIP
        >>> model = DistributedModelParallel(model, plan=plan, sharders=sharders)  # doctest: +SKIP
    """

    def __init__(self, dense_sharder: EmbeddingBagCollectionSharder | None = None) -> None:
        self.dense_sharder = dense_sharder or EmbeddingBagCollectionSharder()
        super().__init__(self.dense_sharder.qcomm_codecs_registry)

    def shard(
        self,
        module: TTEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTEmbeddingBagCollection:
        """Shard a collection; `params` has a parameter sharding for each table, dense ones included.

        Raises:
            ValueError: for a table without a parameter sharding, two-dimensional parallelism, or a collection in a managed
                collision module, which another sharder shards; as `ShardedTTEmbeddingBagCollection`.
        """
        managed_path(module_fqn or "")
        if isinstance(env, ShardingEnv2D):
            raise UserError("TT tables can't be sharded over groups of processes that are replicas (DMPCollection): use one group")
        missing = [config.name for config in module.embedding_bag_configs() if config.name not in params]
        if missing:
            raise UserError(f"the sharding plan has no entry for table {missing[0]!r}: make it with TTShardingPlanner")
        device = device or torch.device("cpu")
        return ShardedTTEmbeddingBagCollection(module, params, env, self.dense_sharder_of(module), device, module_fqn)

    def dense_sharder_of(self, module: TTEmbeddingBagCollection) -> EmbeddingBagCollectionSharder | EmbeddingCollectionSharder:
        """Return the sharder of a collection's dense tables."""
        if module.is_pooled:
            return self.dense_sharder
        return EmbeddingCollectionSharder(self.dense_sharder.fused_params, self.qcomm_codecs_registry)

    def shardable_parameters(self, module: TTEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return a tensor [num_embeddings, embedding_dim] for each table; a TT table's is on the meta device and never formed."""
        tables = {
            config.name: nn.Parameter(torch.empty(config.num_embeddings, config.embedding_dim, device="meta"))
            for config in module.tt_configs()
        }
        dense_sharder: Any = self.dense_sharder_of(module)
        if isinstance(module.dense_bags, dense_sharder.module_type):
            tables |= dense_sharder.shardable_parameters(module.dense_bags)
        return tables

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Raise ValueError: only planners call this, and TorchRec's would take a TT table for the dense one."""
        raise UserError("TorchRec's planner can't estimate TT tables: make the plan with TTShardingPlanner, and give it as plan=")

    @property
    def module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection


def managed_path(path: str, *, has_sharder: bool = False) -> str | None:
    """Return the path of the managed collision module around the collection at `path`; None if there is none.

    Raises:
        ValueError: if nothing can shard that module; `has_sharder` says whether there is a sharder for such modules of TT tables.
    """
    parts = path.split(".")
    if MANAGED not in parts:
        return None
    around = ".".join(parts[: parts.index(MANAGED)])
    named = f"{around or 'the model'} is a managed collision module"
    if parts[-1] != MANAGED:
        raise UserError(f"{named} of sequences, which TorchRec shards only over its own collections: keep its tables dense")
    if not has_sharder:
        raise UserError(f"{named}: give TTManagedCollisionEmbeddingBagCollectionSharder() after TorchRec's sharders")
    return around
