"""TorchRec's DLRM with tensor-train tables and MLPs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import TTLinearConfig, compress_linears_
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.interaction import PairwiseInteraction
from comera_rec.tt import require_positive


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
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: outputs of the bottom MLP's layers; the last is the embedding dimension.
        over_arch_layer_sizes: outputs of the top MLP's layers; the last is 1.
        linears: which MLP layers become tensor trains (see `TTLinearConfig`); None keeps all dense. Small layers stay dense.
        device: default the CPU.

    Raises:
        ValueError: for sizes below 1, no tables, tables of several dimensions, or a last bottom layer of another size than theirs.

    Returns:
        A model called as `model(dense_features, sparse_features) -> logits [B, 1]`.
    """
    require_positive(dense_in_features=dense_in_features)
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
    model = DLRM(collection, dense_in_features, list(dense_arch_layer_sizes), list(over_arch_layer_sizes), dense_device)
    model.inter_arch = PairwiseInteraction(model.inter_arch.F)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if linears is not None and any(linears.shape_for(layer.in_features, layer.out_features) for layer in layers):
        compress_linears_(model, linears)
    return model
