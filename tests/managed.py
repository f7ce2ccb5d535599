"""Modules of TorchRec that give ids of any size numbers from 0 on, table by table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule


def managed_collisions(
    tables: Sequence[BaseEmbeddingConfig], *, device: str = "cpu", interval: int = 1, buckets: int = 1
) -> ManagedCollisionCollection:
    """Build managed collisions as large as the tables, which evict ids every `interval` batches."""
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device(device),
            eviction_interval=interval,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            buckets=buckets,
        )
        for config in tables
    }
    return ManagedCollisionCollection(modules, list(tables))
