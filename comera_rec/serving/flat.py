"""The whole model with tensors alone as inputs: what is exported.

B rows, I integer columns, F categorical columns, V values, N embedding dimension.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM

from comera_rec.nn import TTLinear
from comera_rec.tt import contract


class FlatModel(nn.Module):
    """A DLRM over tables in serving form.

    Args:
        model: its MLPs are used, TT layers as two products or one, whichever reads fewer numbers.
        tables: called as `tables(lead [B, N], values, lengths)` -> [B, 1 + F, N].
    """

    pairs: Tensor

    def __init__(self, model: DLRM, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.dense_arch, self.over_arch = (_served(part) for part in (model.dense_arch, model.over_arch))
        features = model.inter_arch.F + 1
        first, second = torch.triu_indices(features, features, offset=1)
        self.register_buffer("pairs", first * features + second)

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Probabilities [B] of dense [B, I] float32, values [V] int64 feature by feature, lengths [F * B] int64 of their bags."""
        return self.logits(dense, values, lengths).sigmoid()

    def logits(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """What `forward` gives before the sigmoid, [B]."""
        integers = self.dense_arch(dense)
        features = self.tables(integers, values, lengths)
        products = torch.bmm(features, features.mT).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.over_arch(torch.cat([integers, products], dim=1)).squeeze(1)
        return logits


def _served(part: nn.Module) -> nn.Module:
    """A copy with every TT layer in serving form."""
    memo = {id(layer): _serving_layer(layer) for layer in part.modules() if isinstance(layer, TTLinear)}
    return copy.deepcopy(part, memo)


def _serving_layer(layer: TTLinear) -> nn.Module:
    """A TT layer as a product with its dense weight or, where that reads fewer numbers, with the two halves of its cores."""
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


_WORTH = 2.0  # times fewer numbers that two products must read to be worth one more call
