"""Table configs: TorchRec's, plus TT ranks and hot rows."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torchrec import PoolingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, EmbeddingConfig

from comera_rec.nn.hot_rows import require_blocks
from comera_rec.nn.tt_table import table_shape
from comera_rec.tt import Blocks, TTShape, blocks_params, require_positive
from data_pipeline.errors import UserError

_SAMPLED = 1 << 24  # the most entries that are drawn from an `init_fn` to estimate its standard deviation
DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


@dataclass(eq=False)
class _TTFields(BaseEmbeddingConfig):
    """Common part of the configs of pooled and unpooled tables: the fields that each adds to a TorchRec config, `_plain`."""

    _plain: ClassVar[type[Any]]
    tt_ranks: int | tuple[int, ...] | None = None
    shape: TTShape | None = None
    hot_rows: Blocks = ()

    def __post_init__(self) -> None:
        try:
            require_positive(num_embeddings=self.num_embeddings, embedding_dim=self.embedding_dim)
            if self.is_tt:
                self.tt_shape().require_covers(self.num_embeddings, self.embedding_dim)
            elif self.hot_rows:
                raise UserError(f"hot_rows is {self.hot_rows}, which a dense table can't have: give tt_ranks or shape")
            require_blocks(self.hot_rows, self.num_embeddings)
        except ValueError as error:
            raise UserError(f"table {self.name!r}: {error}") from None
        super().__post_init__()

    def __eq__(self, other: object) -> bool:
        """Compare the fields; TorchRec's config of the same table is equal, as its managed collision modules require."""
        if type(other) is self._plain:
            return bool(self.dense() == other)
        return isinstance(other, _TTFields) and type(other) is type(self) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_tt(self) -> bool:
        """Whether the table is a TT table."""
        return self.tt_ranks is not None or self.shape is not None

    def tt_shape(self) -> TTShape:
        """Modes and TT ranks of the table."""
        return table_shape(self.num_embeddings, self.embedding_dim, self.shape, self.tt_ranks)

    @property
    def num_params(self) -> int:
        """Number of the table's parameters."""
        if not self.is_tt:
            return self.num_embeddings * self.embedding_dim
        return self.tt_shape().num_params + blocks_params(self.hot_rows, self.embedding_dim)

    def dense(self, kind: type[Any] | None = None) -> Any:
        """The TorchRec config of the same table, by default of the kind that this one extends."""
        kind = kind or self._plain
        return kind(**_fields(self, kind))

    @classmethod
    def from_dense(cls, config: BaseEmbeddingConfig, shape: TTShape | None, hot_rows: Blocks = ()) -> Self:
        """A TorchRec config with a shape; None keeps the table dense."""
        return cls(**_fields(config, cls._plain), shape=shape, hot_rows=hot_rows)

    def init_std(self) -> float:
        """Standard deviation of the entries of a dense table of this config: by `init_fn`, or TorchRec's uniform distribution."""
        init_fn = self.init_fn
        assert init_fn is not None  # TorchRec fills it in
        if isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and init_fn.keywords.keys() == {"a", "b"}:
            return (init_fn.keywords["b"] - init_fn.keywords["a"]) / math.sqrt(12)

        def initialized(rows: int) -> torch.Tensor:
            sample = torch.empty(rows, self.embedding_dim, device="cpu")
            returned = init_fn(sample)
            return sample if returned is None else returned

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            rows = min(self.num_embeddings, _SAMPLED // self.embedding_dim)  # all, if possible: Xavier's depends on their number
            try:
                entries = initialized(rows)
            except RuntimeError:  # `init_fn` copies a whole table
                entries = initialized(self.num_embeddings)
        return float(entries.std(correction=0))


@dataclass(eq=False)
class TTEmbeddingBagConfig(_TTFields, EmbeddingBagConfig):
    """`torchrec.EmbeddingBagConfig` plus the TT ranks of the table.

    Args:
        tt_ranks: ranks, one for all bonds or one each; None (and no `shape`) keeps the table dense.
        shape: modes and ranks, instead of `tt_ranks`.
        hot_rows: blocks (rows, width) of the most frequent ids, where ids are ordered by frequency; see `TTTable`.

    Raises:
        ValueError: naming the table, for sizes or ranks below 1, a shape too small for the table, or both `tt_ranks` and `shape`;
            for hot rows of a table that stays dense, or more of them than it has rows.
    """

    _plain = EmbeddingBagConfig

    def with_changes(self, **changes: Any) -> "TTEmbeddingBagConfig":
        """Return a copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(eq=False)
class TTEmbeddingConfig(_TTFields, EmbeddingConfig):
    """`torchrec.EmbeddingConfig`, for a table whose rows are not pooled, plus the TT ranks of the table.

    Args:
        tt_ranks, shape, hot_rows: as for `TTEmbeddingBagConfig`.

    Raises:
        ValueError: as `TTEmbeddingBagConfig`.
    """

    _plain = EmbeddingConfig

    def pooled(self) -> TTEmbeddingBagConfig:
        """The config of the same table with pooled rows."""
        return TTEmbeddingBagConfig(**_fields(self, TTEmbeddingConfig))


def _fields(config: BaseEmbeddingConfig, kind: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(kind)}


def require_valid(configs: Sequence[TTEmbeddingBagConfig]) -> None:
    """Raise ValueError unless tables have different, valid names, and poolings and data types that are supported."""
    seen = set()
    for config in configs:
        if config.name in seen:
            raise UserError(f"two tables are named {config.name!r}: give each table a different name")
        seen.add(config.name)
        if not config.name or "." in config.name or hasattr(nn.ModuleDict(), config.name):
            raise UserError(f"table name {config.name!r} can't name a submodule of an nn.ModuleDict: choose another, without dots")
        if len(set(config.feature_names)) < len(config.feature_names):
            raise UserError(f"table {config.name!r} has a feature twice, of {', '.join(config.feature_names)}: name each once")
        if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise UserError(f"table {config.name!r} has pooling {config.pooling}: choose SUM or MEAN")
        if config.is_tt and config.data_type not in DTYPES:
            raise UserError(f"table {config.name!r} has data type {config.data_type}: a TT table takes FP32, FP16 or BF16")
