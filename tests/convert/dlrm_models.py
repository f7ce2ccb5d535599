"""Models of a TT table, a dense table, and linear layers."""

from __future__ import annotations

from torch import nn
from torchrec import EmbeddingBagConfig

from comera_rec import TTEmbeddingBagConfig, build_dlrm
from comera_rec.nn import named_tt_modules


def tables() -> list[EmbeddingBagConfig]:
    return [
        TTEmbeddingBagConfig(name="t1", num_embeddings=401, embedding_dim=16, feature_names=["f1"], tt_ranks=(3, 4)),
        EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
    ]


def dlrm() -> nn.Module:
    """Build a model whose rank parameters differ from 1."""
    model = build_dlrm(tables(), dense_in_features=5, dense_arch_layer_sizes=[128, 128, 16], over_arch_layer_sizes=[128, 1])
    for rank in (rank for _, module in named_tt_modules(model) for rank in module.rank_parameters()):
        nn.init.uniform_(rank, 0.5, 1.5)
    return model
