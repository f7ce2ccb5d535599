"""The exported form of a whole model: its inputs are plain tensors.

B rows, I integer columns, F categorical columns, V values, N embedding dimension, L labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.models.deepfm import FMInteractionArch, SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, InteractionArch, InteractionDCNArch

from comera_rec.nn import TTLinear
from comera_rec.ops import interact_features
from comera_rec.recsys import WideDeep
from comera_rec.serving.fast import FastTables
from comera_rec.tt import contract
from data_pipeline.errors import UserError


class FlatModel(nn.Module):
    """A DLRM, DLRM-DCNv2 or DeepFM over tables in serving form.

    Args:
        model: the trained model, whose tables are ignored. TT layers become one or two dense layers, whichever read fewer numbers.
        tables: called as `tables(lead [B, N], values, lengths)` -> [B, 1 + F, N].

    Raises:
        ValueError: for a Wide & Deep model.
    """

    def __init__(self, model: DLRM | SimpleDeepFMNN | WideDeep, tables: nn.Module) -> None:
        super().__init__()
        if isinstance(model, WideDeep):
            raise UserError("a Wide & Deep model can't be packaged: export it dense, to a folder (--output DIR/)")
        self.tables = tables
        self.dense_arch, self.over_arch = (_served(part) for part in (model.dense_arch, model.over_arch))
        kind = next(kind for kind in _INTERACTIONS if isinstance(model.inter_arch, kind))
        is_fast = kind is InteractionArch and isinstance(tables, FastTables)
        self.interaction = _FastProducts() if is_fast else _INTERACTIONS[kind](model.inter_arch)

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Return probabilities [B]; [B, L] of a model of several labels.

        Args:
            dense: [B, I] float32.
            values: [V] int64, ids feature by feature.
            lengths: [F * B] int64, ids of each bag, feature by feature.
        """
        return self.logits(dense, values, lengths).sigmoid()

    def logits(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits, whose sigmoid `forward` returns."""
        integers = self.dense_arch(dense)
        features = self.tables(integers, values, lengths)
        logits: Tensor = self.over_arch(self.interaction(features)).squeeze(1)
        return logits


class _Products(nn.Module):
    """DLRM's interaction: the integer columns' features, and products of all pairs."""

    pairs: Tensor

    def __init__(self, model: InteractionArch) -> None:
        super().__init__()
        features = model.F + 1
        first, second = torch.triu_indices(features, features, offset=1)
        self.register_buffer("pairs", first * features + second)

    def forward(self, features: Tensor) -> Tensor:
        products = torch.bmm(features, features.mT).flatten(1).index_select(1, self.pairs)
        return torch.cat([features[:, 0], products], dim=1)


class _FastProducts(nn.Module):
    """`_Products` as an operator of the library that fast tables need."""

    def forward(self, features: Tensor) -> Tensor:
        return interact_features(features)


class _Crosses(nn.Module):
    """DLRM-DCNv2's cross network."""

    def __init__(self, model: InteractionDCNArch) -> None:
        super().__init__()
        self.crossnet = copy.deepcopy(model.crossnet)

    def forward(self, features: Tensor) -> Tensor:
        crossed: Tensor = self.crossnet(features.flatten(1))
        return crossed


class _Factors(nn.Module):
    """DeepFM's interaction: the integer columns' features, the deep part, and the factorization machine."""

    def __init__(self, model: FMInteractionArch) -> None:
        super().__init__()
        self.model, self.names = _served(model), list(model.sparse_feature_names)

    def forward(self, features: Tensor) -> Tensor:
        integers, *others = features.unbind(1)
        interacting: Tensor = self.model(integers, dict(zip(self.names, others, strict=True)))
        return interacting


_INTERACTIONS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    InteractionArch: _Products,
    InteractionDCNArch: _Crosses,
    FMInteractionArch: _Factors,
}


def _served(part: nn.Module) -> nn.Module:
    """Copy a module with every TT layer in serving form."""
    memo = {id(layer): _serving_layer(layer) for layer in part.modules() if isinstance(layer, TTLinear)}
    return copy.deepcopy(part, memo)


def _serving_layer(layer: TTLinear) -> nn.Module:
    """Convert a TT layer to one dense layer or, where that reads far fewer numbers, to two dense layers of its core halves."""
    cores = layer.scaled_cores()
    cut = next(k for k in range(1, len(cores)) if set(layer.shape.col_shape[:k]) == {1} == set(layer.shape.row_shape[k:]))
    rank = layer.shape.ranks[cut - 1]
    if _WORTH * rank * (layer.in_features + layer.out_features) >= layer.in_features * layer.out_features:
        return layer.to_dense()
    first = nn.Linear(layer.in_features, rank, bias=False)
    second = nn.Linear(rank, layer.out_features, bias=layer.bias is not None)
    with torch.no_grad():
        first.weight.copy_(contract(cores[:cut])[0, :, 0][: layer.in_features].mT)
        second.weight.copy_(contract(cores[cut:])[:, 0, :, 0][:, : layer.out_features].mT)
        if layer.bias is not None:
            second.bias.copy_(layer.bias)
    return nn.Sequential(first, second)


_WORTH = 2.0  # two products must read this many times fewer numbers to be worth one more call
