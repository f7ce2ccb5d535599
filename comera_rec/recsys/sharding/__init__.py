"""Tensor-train tables on TorchRec's engine: sharded modules for DistributedModelParallel, and its planner taught their true cost."""

from comera_rec.recsys.sharding.collection import ShardedTTEmbeddingBagCollection
from comera_rec.recsys.sharding.planner import TTShardingPlanner
from comera_rec.recsys.sharding.sharder import TTEmbeddingBagCollectionSharder

__all__ = ["ShardedTTEmbeddingBagCollection", "TTEmbeddingBagCollectionSharder", "TTShardingPlanner"]
