"""How DLRM's features meet: dot products of all pairs, or a cross network.

B batch size, F features (the dense one included), P = F (F - 1) / 2 pairs, N embedding dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet


class PairwiseInteraction(InteractionArch):
    """TorchRec's interaction with half of its work backward: products are symmetric, so one matrix holds both sides' gradients."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """[B, N] and [B, F - 1, N] -> [B, N + P]: the dense features, and the products (0, 1), (0, 2), ..., (F - 2, F - 1)."""
        features = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        return torch.cat([dense_features, pairwise_products(features, self.triu_indices)], dim=1)


class CrossNetwork(LowRankCrossNet):
    """TorchRec's low-rank cross network in two passes over [B, F * N] a layer fewer; autocast's products are kept in their type.

    x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, section 3.3)
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, F * N] -> [B, F * N]."""
        x = input
        for narrow, wide, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            x = torch.addcmul(x, input, F.linear(F.linear(x, narrow), wide, bias))
        return x


def pairwise_products(features: Tensor, pairs: Tensor) -> Tensor:
    """Dot products of features [B, F, N] by pairs [2, P] -> [B, P], of autocast's type where it is on."""
    device = features.device
    if torch.is_autocast_enabled(device.type):
        features = features.to(torch.get_autocast_dtype(device.type))
    products: Tensor = _PairwiseProducts.apply(features, pairs.to(device))
    return products


class _PairwiseProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(features, pairs)
        first, second = pairs.unbind()
        return torch.bmm(features, features.mT).flatten(1).index_select(1, first * features.shape[1] + second)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        features, pairs = ctx.saved_tensors
        size, (first, second) = features.shape[1], pairs.unbind()
        place = torch.full((size, size), len(first), device=grad.device)  # of the diagonal: a zero behind all pairs
        place[first, second] = place[second, first] = torch.arange(len(first), device=grad.device)
        both = F.pad(grad, (0, 1)).index_select(1, place.flatten()).unflatten(1, (size, size))
        return torch.bmm(both, features), None


torch.fx.wrap("pairwise_products")
