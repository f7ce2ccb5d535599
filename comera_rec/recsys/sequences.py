"""A collection of embedding tables whose rows are not pooled: sequences in, a row for each id out.

B batch size, F features (keys), L_f ids of feature f in a batch, N embedding_dim, the same for all tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.recsys.collection import TTEmbeddingBagCollection, require_keys
from comera_rec.recsys.config import TTEmbeddingCollectionConfig


class TTEmbeddingCollection(EmbeddingCollectionInterface):
    """`torchrec.EmbeddingCollection` whose large tables are TT tables.

    Takes a KeyedJaggedTensor, returns a JaggedTensor for each feature, with the keys, order and values of an EmbeddingCollection
    that holds the densified tables. A row is the bag of one id: the tables are those of a `TTEmbeddingBagCollection`, the child
    `tables`. `TTEmbeddingBagCollectionSharder` shards it (data-parallel, table-wise or row-wise) under `DistributedModelParallel`.

    Internally, features are padded with rows of zeros to the longest one's length: put features of similar lengths together.

    Args:
        tables: one config per table; `torchrec.EmbeddingConfig` or `TTEmbeddingCollectionConfig` without ranks mean dense.
        device: default the CPU.
        need_indices: whether the JaggedTensors carry the ids as their weights.

    Raises:
        ValueError: for no tables, tables of different dimensions, and as `TTEmbeddingBagCollection`.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> table = TTEmbeddingCollectionConfig(
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
        self, tables: Sequence[EmbeddingConfig], device: torch.device | str | None = None, need_indices: bool = False
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("tables is empty: give at least one table config")
        dims = sorted({table.embedding_dim for table in tables})
        if len(dims) > 1:
            raise ValueError(f"tables have dimensions {dims}: give the same for all, or make several collections")
        self._configs = [
            t if isinstance(t, TTEmbeddingCollectionConfig) else TTEmbeddingCollectionConfig.from_dense(t, None) for t in tables
        ]
        self.tables = TTEmbeddingBagCollection([config.pooled() for config in self._configs], device=device)
        for config in self._configs:
            config.feature_names = config.feature_names or [config.name]
        self._names = get_embedding_names_by_table(self._configs)
        self._features = [feature for config in self._configs for feature in config.feature_names]  # two tables may share one
        self._need_indices = need_indices

    @one_call_in_fx
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
        features = maybe_td_to_kjt(features, None)
        require_keys(features, self._configs)
        by_feature = features.to_dict()
        selected = {feature: by_feature[feature] for feature in self._features}
        rows_of_keys = self.tables(_bags_of_one_id(selected)).values().split(self.embedding_dim(), dim=1)
        keys = [key for names in self._names for key in names]
        return {
            key: JaggedTensor(
                values=rows[: selected[feature].values().shape[0]],
                lengths=selected[feature].lengths(),
                weights=selected[feature].values() if self._need_indices else None,
            )
            for key, feature, rows in zip(keys, self._features, rows_of_keys, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of all tables, in order; `shape` is the one at construction."""
        return list(self._configs)

    def need_indices(self) -> bool:
        """Whether the JaggedTensors carry the ids as their weights."""
        return self._need_indices

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
    def device(self) -> torch.device:
        """The device given at construction."""
        return self.tables.device

    def reset_parameters(self) -> None:
        """Initialize every table again."""
        self.tables.reset_parameters()


def _bags_of_one_id(features: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """Put each id into a separate bag, and pad features with empty bags to the longest one's length: one batch size for all."""
    ids = [feature.values() for feature in features.values()]
    longest = reduce(torch.sym_max, (feature_ids.shape[0] for feature_ids in ids), 1)  # len and max fail in torch.export
    numbers = torch.arange(longest, device=ids[0].device)
    lengths = [(numbers < feature_ids.shape[0]).long() for feature_ids in ids]
    return KeyedJaggedTensor(keys=list(features), values=torch.cat(ids), lengths=torch.cat(lengths), stride=longest)
