"""Wide & Deep: a linear model of the ids beside an MLP over their embeddings.

B batch size, I dense features, F categorical features, N embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.models.deepfm import SparseArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mlp import MLP

from comera_rec.nn import LinearCompression
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.dlrm import compress_large_linears_, require_inputs
from comera_rec.tt import require_positive
from data_pipeline.errors import UserError

_COLUMNS = 4
"""Columns of a wide table, whose sum is an id's weight: FBGEMM's fused and sharded tables require multiples of four."""
_INIT_BOUND = 0.005  # bound on a wide table's initial entries: small, so that the deep part dominates at first


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al., arXiv 1606.07792, section 3): the sum of a linear model's logits and an MLP's, trained together.

    Args:
        embeddings: looks up embeddings of the categorical features.
        weights: looks up their weights, each the sum of a short row.
        mlp: takes dense features and embeddings; has L outputs.
        dense_in_features: I.
        buckets: modulus of the wide part's ids; 0 where every id has a weight.
        outputs: L.
    """

    def __init__(
        self, embeddings: SparseArch, weights: SparseArch, mlp: nn.Module, dense_in_features: int, buckets: int, outputs: int = 1
    ) -> None:
        super().__init__()
        self.sparse_arch, self.wide_arch, self.deep_arch = embeddings, weights, mlp
        self.dense_weights = nn.Linear(dense_in_features, outputs, bias=False) if dense_in_features else None
        self.buckets, self.outputs = buckets, outputs

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """[B, I] and F features -> [B, L] logits."""
        logits: Tensor = self.deep_arch(torch.cat([dense_features, self.sparse_arch(sparse_features).values()], dim=1))
        weights_BFLC = self.wide_arch(self._hashed(sparse_features)).values().unflatten(1, (-1, self.outputs, _COLUMNS))
        logits = logits + weights_BFLC.sum(dim=(1, 3))
        return logits if self.dense_weights is None else logits + self.dense_weights(dense_features)

    def _hashed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not self.buckets:
            return features
        return KeyedJaggedTensor(
            features.keys(), features.values() % self.buckets, features.weights_or_none(), lengths=features.lengths()
        )


def wide_tables(tables: Sequence[EmbeddingBagConfig], buckets: int = 0, *, outputs: int = 1) -> list[EmbeddingBagConfig]:
    """Configs of tables with one weight per id, for the features of other tables, whose names get the prefix "wide_".

    Args:
        tables: configs of the embedding tables.
        buckets: largest number of rows of a wide table, and the modulus of its ids: where ids are ordered by frequency, the most
            frequent ones share their weights only with rarer ones. 0 for as many rows as the embedding table has.
        outputs: weights per id.

    Raises:
        ValueError: for a negative number of buckets, no outputs, or tables named "x" and "wide_x".
    """
    if buckets < 0:
        raise UserError(f"buckets is {buckets}: give the largest number of weights per table, or 0 for one per id")
    require_positive(outputs=outputs)
    names = {table.name for table in tables}
    for name in sorted(names):
        if f"wide_{name}" in names:
            raise UserError(f"tables {name!r} and 'wide_{name}' would share the name 'wide_{name}': rename one of them")
    return [
        EmbeddingBagConfig(
            name=f"wide_{table.name}",
            num_embeddings=min(table.num_embeddings, buckets or table.num_embeddings),
            embedding_dim=_COLUMNS * outputs,
            feature_names=list(table.feature_names),
            pooling=PoolingType.SUM,
            weight_init_min=-_INIT_BOUND,
            weight_init_max=_INIT_BOUND,
        )
        for table in tables
    ]


def build_wide_deep(
    tables: Sequence[EmbeddingBagConfig],
    *,
    dense_in_features: int,
    deep_layer_sizes: Sequence[int],
    wide: Sequence[EmbeddingBagConfig] | None = None,
    buckets: int = 0,
    outputs: int = 1,
    linears: LinearCompression | None = LinearCompression(tt_ranks=32),  # noqa: B008  frozen
    device: torch.device | str | None = None,
) -> WideDeep:
    """Build a Wide & Deep model (Cheng et al., arXiv 1606.07792) from TorchRec's modules, large tables and layers in TT form.

    Args:
        tables: one config per embedding table; those with `tt_ranks` or `shape` become TT tables, the others stay dense.
        dense_in_features: number of dense features, 0 or more, which both parts take.
        deep_layer_sizes: outputs of the MLP's hidden layers.
        wide: dense or TT tables for the same features; a row's sum is the id's weight. Default: `wide_tables(tables, buckets)`.
        buckets: modulus of the wide part's ids; 0 for ids as they are.
        outputs: L, one logit for each label.
        linears, device: as for `build_dlrm`.

    Raises:
        ValueError: for sizes below 1, a negative number of dense features or of buckets, or no tables.

    Returns:
        A model called as `model(dense_features, sparse_features) -> logits [B, L]`.
    """
    require_inputs(tables, dense_in_features)
    require_positive(outputs=outputs, **{f"deep_layer_sizes[{i}]": size for i, size in enumerate(deep_layer_sizes)})
    wide = wide_tables(tables, buckets, outputs=outputs) if wide is None else wide
    collection = TTEmbeddingBagCollection(tables, device=device)
    width = dense_in_features + sum(collection.output_lengths())
    mlp = nn.Sequential(MLP(width, list(deep_layer_sizes)), nn.Linear(deep_layer_sizes[-1] if deep_layer_sizes else width, outputs))
    weights = SparseArch(TTEmbeddingBagCollection(wide, device=device))
    model = WideDeep(SparseArch(collection), weights, mlp, dense_in_features, buckets, outputs).to(device or "cpu")
    return compress_large_linears_(model, linears)
