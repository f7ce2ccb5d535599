"""DLRM's interaction: dot products of all pairs of a sample's features, beside its dense features.

B batch size, F features (the dense one included), P = F (F - 1) / 2 pairs, N embedding dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.autocast import is_autocast_on
from comera_rec.ops.derivatives import in_plain_torch
from comera_rec.ops.native import ops


def interact(dense: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
    """Compute DLRM's interaction (Naumov et al., arXiv 1906.00091, section 2.1).

    Args:
        dense: [B, N] dense features.
        rows: [B, F - 1, N] pooled rows.
        pairs: [2, P] the two features of each pair, in the order of the output: (0, 1), (0, 2), ..., (F - 2, F - 1).

    Returns:
        [B, N + P]: the dense features, then the products; these are computed in autocast's type where it is on.
    """
    is_float32 = dense.dtype == rows.dtype == torch.float32 and not is_autocast_on(dense.device)
    is_transformed = in_plain_torch() or torch.compiler.is_compiling()
    if dense.device.type == "cpu" and is_float32 and rows.numel() and not is_transformed:
        rows = rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
        interaction: Tensor = _Interaction.apply(dense.contiguous(), rows, pairs)
        return interaction
    features = torch.cat([dense.unsqueeze(1), rows], dim=1)
    return torch.cat([dense, pairwise_products(features, pairs)], dim=1)


def pairwise_products(features: Tensor, pairs: Tensor) -> Tensor:
    """Dot products of features [B, F, N] by pairs [2, P] -> [B, P], of autocast's type where it is on."""
    device = features.device
    if is_autocast_on(device):
        features = features.to(torch.get_autocast_dtype(device.type))
    products: Tensor = _PairwiseProducts.apply(features, pairs.to(device))
    return products


class _Interaction(torch.autograd.Function):
    """The operators of `csrc/interaction.cpp`, which copy no features; a second derivative is taken in plain torch."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(dense, rows, pairs)
        out: Tensor = ops.interact(dense, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dense, rows, pairs = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *ops.interact_backward(grad.contiguous(), dense, rows), None
        features, width = torch.cat([dense.unsqueeze(1), rows], dim=1), dense.shape[1]
        feature_gradients = torch.bmm(_symmetric(grad[:, width:], pairs, features.shape[1]), features)
        return grad[:, :width] + feature_gradients[:, 0], feature_gradients[:, 1:], None


class _PairwiseProducts(torch.autograd.Function):
    """Half of autograd's work in backward: products are symmetric, so one matrix holds both sides' gradients."""

    @staticmethod
    def forward(features: Tensor, pairs: Tensor) -> Tensor:
        first, second = pairs.unbind()
        return torch.bmm(features, features.mT).flatten(1).index_select(1, first * features.shape[1] + second)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        features, pairs = ctx.saved_tensors
        return torch.bmm(_symmetric(grad, pairs, features.shape[1]), features), None


def _symmetric(grad: Tensor, pairs: Tensor, size: int) -> Tensor:
    """Gradients of pairs [B, P] -> symmetric matrices [B, F, F] with zeros on the diagonal."""
    first, second = pairs.unbind()
    pair_index = torch.full((size, size), len(first), device=grad.device)  # the diagonal points to a zero after all pairs
    pair_index[first, second] = pair_index[second, first] = torch.arange(len(first), device=grad.device)
    return F.pad(grad, (0, 1)).index_select(1, pair_index.flatten()).unflatten(1, (size, size))
