"""A collection of embedding tables whose rows are not pooled: sequences in, a row for each id out.

B batch size, F features (keys), L_f ids of feature f in a batch, N embedding_dim, the same for all tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingConfig
from comera_rec.recsys.keyed import BoundsCheck, take_weights
from data_pipeline.errors import UserError


class TTEmbeddingCollection(EmbeddingCollectionInterface):
    """`torchrec.EmbeddingCollection` whose large tables are TT tables.

    Takes a KeyedJaggedTensor, returns a JaggedTensor for each feature, with the keys, order and values of an EmbeddingCollection
    that holds the densified tables. The tables are those of a `TTEmbeddingBagCollection` that doesn't pool, the child `tables`;
    its child `dense_bags` is an EmbeddingCollection of the dense ones. `TTEmbeddingBagCollectionSharder` shards it (data-parallel,
    table-wise or row-wise) under `DistributedModelParallel`.

    Args:
        tables: one config per table; `torchrec.EmbeddingConfig` or `TTEmbeddingConfig` without ranks mean dense.
        device: default the CPU.
        need_indices: whether the JaggedTensors carry the ids as their weights.
        use_gather_select: as for EmbeddingCollection, for the dense tables.

    Raises:
        ValueError: for no tables, tables of different dimensions, and as `TTEmbeddingBagCollection`.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> table = TTEmbeddingConfig(
        ...     name="products", num_embeddings=10_000, embedding_dim=16, feature_names=["seen"], tt_ranks=8
        ... )
        >>> #         user 0      user 1   user 2
        >>> # "seen"  [3, 9999]   []       [3]
        >>> features = KeyedJaggedTensor(keys=["seen"], values=torch.tensor([3, 9999, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> rows = TTEmbeddingCollection([table])(features)["seen"]
        >>> rows.values().shape, rows.lengths().tolist()
        (torch.Size([3, 16]), [2, 0, 1])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
    ) -> None:
        super().__init__()
        if not tables:
            raise UserError("tables is empty: give at least one table config")
        dims = sorted({table.embedding_dim for table in tables})
        if len(dims) > 1:
            raise UserError(f"tables have dimensions {dims}: give the same for all, or make several collections")
        self._configs = [t if isinstance(t, TTEmbeddingConfig) else TTEmbeddingConfig.from_dense(t, None) for t in tables]
        self.tables = TTEmbeddingBagCollection([config.pooled() for config in self._configs], device=device, is_pooled=False)
        self._compressed = self.tables.embedding_bag_configs()
        for config in self._configs:
            config.feature_names = config.feature_names or [config.name]
        self._names = get_embedding_names_by_table(self._configs)
        features = [feature for config in self._configs for feature in config.feature_names]  # two tables may share one
        self.by_key = _ByKey([key for names in self._names for key in names], features, need_indices)
        self._need_indices = need_indices
        self._use_gather_select = use_gather_select
        if isinstance(self.tables.dense_bags, EmbeddingCollection):
            self.tables.dense_bags._use_gather_select = use_gather_select

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        take_weights(self._compressed, state_dict, f"{prefix}embeddings", f"{prefix}tables.dense_bags.embeddings", others[-1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the row of every id.

        Args:
            features: F features; [L_f] ids of each.

        Raises:
            ValueError: naming the table, the id and the limit, if an id is out of range (checked on CPU); naming the table, if its
                feature is missing.
            TypeError: for anything but a KeyedJaggedTensor (or a TensorDict).

        Returns:
            By feature (by feature and table, where tables share one) a JaggedTensor of [L_f, N] values.
        """
        if isinstance(self.tables, ShardedModule):  # TorchRec's pipelines, which trace models, must find it
            features = features if isinstance(features, Proxy) else maybe_td_to_kjt(features, None)
            rows: dict[str, JaggedTensor] = self.by_key(self.tables(features), features)
            return rows
        return self._look_up(features)

    @one_call_in_fx
    def _look_up(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        features = maybe_td_to_kjt(features, None)
        sequences: dict[str, JaggedTensor] = self.by_key(self.tables(features), features)
        return sequences

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of all tables, in order; `shape` is the one at construction."""
        return list(self._configs)

    def need_indices(self) -> bool:
        """Whether the JaggedTensors carry the ids as their weights."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """Whether TorchRec selects the rows of sharded dense tables by `torch.gather`."""
        return self._use_gather_select

    def embedding_dim(self) -> int:
        """Columns N of every table."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Keys of what `forward` returns, by table."""
        return [list(names) for names in self._names]

    @property
    def embeddings(self) -> dict[str, nn.Module]:
        """The tables by name, in order, as an `EmbeddingCollection` has them; a TT table is a `TTEmbeddingBag`."""
        return self.tables.embedding_bags

    @property
    def bounds_check(self) -> BoundsCheck:
        """What happens to ids out of range, as in a `TTEmbeddingBagCollection`."""
        return self.tables.bounds_check

    @property
    def device(self) -> torch.device:
        """The device given at construction."""
        return self.tables.device

    def reset_parameters(self) -> None:
        """Initialize every table again."""
        self.tables.reset_parameters()


class _ByKey(nn.Module):
    """Rows of all ids -> a JaggedTensor for each key: a module, so that tracers record one call."""

    def __init__(self, keys: Sequence[str], features: Sequence[str], need_indices: bool) -> None:
        super().__init__()
        self._keys, self._features, self._need_indices = keys, features, need_indices

    @one_call_in_fx
    def forward(self, looked_up: KeyedTensor, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        if torch.compiler.is_compiling() or features.lengths().numel():
            by_feature = features.to_dict()
        else:  # no samples, for which TorchRec finds no stride
            none = JaggedTensor(features.values(), lengths=features.lengths())
            by_feature = dict.fromkeys(features.keys(), none)
        rows_of_keys = looked_up.values().split(looked_up.length_per_key())
        return {
            key: JaggedTensor(
                values=rows,
                lengths=by_feature[feature].lengths(),
                weights=by_feature[feature].values() if self._need_indices else None,
            )
            for key, feature, rows in zip(self._keys, self._features, rows_of_keys, strict=True)
        }
