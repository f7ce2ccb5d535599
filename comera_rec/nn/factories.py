"""Factories of a transformer's layers, which choose between dense and TT."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from comera_rec.nn.linear import TTLinear
from comera_rec.nn.linear_compression import LinearCompression

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features) -> a layer [..., in_features] -> [..., out_features] with a bias, such as `nn.Linear`."""

EmbeddingFactory = Callable[[int, int], nn.Module]
"""(num_embeddings, embedding_dim) -> a layer from ids [...] to rows [..., embedding_dim], such as `nn.Embedding`."""

EMBEDDING_STD = 0.02
"""Standard deviation of the rows of embeddings: as in BERT, small enough that scores against them start near zero."""


def dense_embedding(num_embeddings: int, embedding_dim: int) -> nn.Embedding:
    """Make an `nn.Embedding` whose rows are drawn with `EMBEDDING_STD`."""
    embedding = nn.Embedding(num_embeddings, embedding_dim)
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    return embedding


def linear_factory(config: LinearCompression) -> LinearFactory:
    """Return a factory of `TTLinear` layers where the config compresses, and of `nn.Linear` layers elsewhere.

    Example:
        >>> linear = linear_factory(LinearCompression(tt_ranks=30, order=6))
        >>> linear(768, 3072)
        TTLinear(768, 3072, modes=[12x1 8x1 8x1 1x12 1x16 1x16], ranks=(12, 30, 30, 30, 16), params=29078)
        >>> linear(768, 2)
        Linear(in_features=768, out_features=2, bias=True)
    """

    def linear(in_features: int, out_features: int) -> nn.Module:
        shape = config.shape_for(in_features, out_features)
        return nn.Linear(in_features, out_features) if shape is None else TTLinear(in_features, out_features, shape=shape)

    return linear
