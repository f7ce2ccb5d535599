"""TorchRec's DLRM and DLRM-DCNv2 with TT tables and layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import LinearCompression, compressed_linears, replace_modules_
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.interaction import CrossNetwork, PairwiseInteraction, StackedFeatures
from comera_rec.tt import require_positive
from data_pipeline.errors import UserError


class LearnedVector(nn.Module):
    """Learned stand-in for the bottom MLP's output where there are no dense features: the same N numbers for every sample."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.vector, std=len(self.vector) ** -0.5)

    def forward(self, features: Tensor) -> Tensor:
        """[B, 0] -> [B, N]."""
        return self.vector.repeat(len(features), 1)  # contiguous, as operators want it


def build_dlrm(
    tables: Sequence[EmbeddingBagConfig],
    *,
    dense_in_features: int,
    dense_arch_layer_sizes: Sequence[int],
    over_arch_layer_sizes: Sequence[int],
    linears: LinearCompression | None = LinearCompression(tt_ranks=32),  # noqa: B008  frozen
    cross_layers: int = 0,
    cross_rank: int = 64,
    device: torch.device | str | None = None,
) -> DLRM:
    """Build TorchRec's DLRM (Naumov et al., arXiv 1906.00091) with large tables and large MLP layers in TT form.

    Args:
        tables: one config per table; those with `tt_ranks` or `shape` become TT tables, the others stay dense.
        dense_in_features: number of dense features; with 0 one learned vector takes the place of the bottom MLP.
        dense_arch_layer_sizes: outputs of the bottom MLP's layers; the last is the embedding dimension.
        over_arch_layer_sizes: outputs of the top MLP's layers; the last is 1, or the number of labels L.
        linears: which MLP layers become TT layers (see `LinearCompression`); None keeps all dense. Small layers stay dense.
        cross_layers: layers of a low-rank cross network in place of products of pairs, DLRM-DCNv2 (Wang et al., DCN V2,
            arXiv 2008.13535, section 3.3); 0 for DLRM.
        cross_rank: rank of the cross network's layers.
        device: default the CPU.

    Raises:
        ValueError: for sizes below 1, a negative number of dense features, no tables, tables of different
            dimensions, or a last bottom layer whose size is not the tables' dimension.

    Returns:
        A model called as `model(dense_features, sparse_features) -> logits [B, L]`.
    """
    if dense_in_features < 0:
        raise UserError(f"dense_in_features is {dense_in_features}: give how many there are, or 0")
    if not tables:
        raise UserError("tables is empty: give at least one table config")
    for name, sizes in (("dense_arch_layer_sizes", dense_arch_layer_sizes), ("over_arch_layer_sizes", over_arch_layer_sizes)):
        if not sizes:
            raise UserError(f"{name} is empty: give at least one layer size")
        require_positive(**{f"{name}[{i}]": size for i, size in enumerate(sizes)})
    if cross_layers < 0:
        raise UserError(f"cross_layers is {cross_layers}: give a number of layers, or 0 for products of pairs")
    require_positive(cross_rank=cross_rank)
    collection = TTEmbeddingBagCollection(tables, device=device)
    dims = {config.embedding_dim for config in tables}
    if dims != {dense_arch_layer_sizes[-1]}:
        raise UserError(
            f"tables have dimensions {sorted(dims)} and dense_arch_layer_sizes ends with {dense_arch_layer_sizes[-1]}: "
            "give the same number for all"
        )
    dense_device = torch.device(device or "cpu")
    widths = max(1, dense_in_features), list(dense_arch_layer_sizes), list(over_arch_layer_sizes)
    if cross_layers:
        model: DLRM = DLRM_DCN(collection, *widths, cross_layers, cross_rank, dense_device)
        crossed = (model.inter_arch.F + 1) * dense_arch_layer_sizes[-1]
        model.inter_arch.crossnet = CrossNetwork(crossed, cross_layers, cross_rank)
        model.to(dense_device)
    else:
        model = DLRM(collection, *widths, dense_device)
        model.inter_arch = PairwiseInteraction(model.inter_arch.F)
    model.sparse_arch = StackedFeatures(collection)
    if not dense_in_features:
        model.dense_arch = LearnedVector(dense_arch_layer_sizes[-1], dense_device)
    if linears is not None:
        replace_modules_(model, compressed_linears(model, linears)[0])
    return model
