"""TorchRec's DLRM with tensor-train tables and MLPs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import TTLinearConfig, compress_linears_
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.interaction import PairwiseInteraction
from comera_rec.tt import require_positive


class LearnedVector(nn.Module):
    """What the bottom MLP would make of dense features, where there are none: the same N numbers for all samples."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.vector, std=len(self.vector) ** -0.5)

    def forward(self, features: Tensor) -> Tensor:
        """[B, 0] -> [B, N]."""
        return self.vector.expand(len(features), -1)


def build_dlrm(
    tables: Sequence[EmbeddingBagConfig],
    *,
    dense_in_features: int,
    dense_arch_layer_sizes: Sequence[int],
    over_arch_layer_sizes: Sequence[int],
    linears: TTLinearConfig | None = TTLinearConfig(tt_ranks=32),  # noqa: B008  frozen
    device: torch.device | str | None = None,
) -> DLRM:
    """Build TorchRec's own DLRM (Naumov et al., arXiv 1906.00091) with large tables and large MLP layers in tensor-train form.

    Args:
        tables: one config a table; those with `tt_ranks` or `shape` become tensor trains, the others stay dense.
        dense_in_features: number of dense features; with 0 one learned vector takes the place of the bottom MLP.
        dense_arch_layer_sizes: outputs of the bottom MLP's layers; the last is the embedding dimension.
        over_arch_layer_sizes: outputs of the top MLP's layers; the last is 1.
        linears: which MLP layers become tensor trains (see `TTLinearConfig`); None keeps all dense. Small layers stay dense.
        device: default the CPU.

    Raises:
        ValueError: for sizes below 1, a negative number of dense features, no tables, tables of several
            dimensions, or a last bottom layer of another size than theirs.

    Returns:
        A model called as `model(dense_features, sparse_features) -> logits [B, 1]`.
    """
    if dense_in_features < 0:
        raise ValueError(f"dense_in_features is {dense_in_features}: give how many there are, or 0")
    if not tables:
        raise ValueError("tables is empty: give at least one table config")
    for name, sizes in (("dense_arch_layer_sizes", dense_arch_layer_sizes), ("over_arch_layer_sizes", over_arch_layer_sizes)):
        if not sizes:
            raise ValueError(f"{name} is empty: give at least one layer size")
        require_positive(**{f"{name}[{i}]": size for i, size in enumerate(sizes)})
    collection = TTEmbeddingBagCollection(tables, device=device)
    dims = {config.embedding_dim for config in tables}
    if dims != {dense_arch_layer_sizes[-1]}:
        raise ValueError(
            f"tables have dimensions {sorted(dims)} and dense_arch_layer_sizes ends with {dense_arch_layer_sizes[-1]}: "
            "DLRM needs one for all"
        )
    dense_device = torch.device(device or "cpu")
    model = DLRM(collection, max(1, dense_in_features), list(dense_arch_layer_sizes), list(over_arch_layer_sizes), dense_device)
    if not dense_in_features:
        model.dense_arch = LearnedVector(dense_arch_layer_sizes[-1], dense_device)
    model.inter_arch = PairwiseInteraction(model.inter_arch.F)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linears is not None and any(linears.shape_for(layer.in_features, layer.out_features) for layer in layers):
        compress_linears_(model, linears)
    return model
