"""TT tables on TorchRec's engine: sharded for DistributedModelParallel, and their true cost in its planner."""

from comera_rec.recsys.sharding.collection import ShardedTTEmbeddingBagCollection
from comera_rec.recsys.sharding.optimizers import clip_grad_norm_, load_optimizer_state_, optimizer_state
from comera_rec.recsys.sharding.planner import TTShardingPlanner
from comera_rec.recsys.sharding.replicas import rewrap_data_parallel_
from comera_rec.recsys.sharding.sharder import TTEmbeddingBagCollectionSharder, TTManagedCollisionEmbeddingBagCollectionSharder

__all__ = [
    "ShardedTTEmbeddingBagCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTManagedCollisionEmbeddingBagCollectionSharder",
    "TTShardingPlanner",
    "clip_grad_norm_",
    "load_optimizer_state_",
    "optimizer_state",
    "rewrap_data_parallel_",
]
