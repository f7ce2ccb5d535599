"""The embedding tables of all fields, called as ids [B, F] -> [B, F, N].

B batch, F fields, M rows and N columns of a table.

Every method keeps tables of fewer than `MIN_ROWS` rows dense and shrinks the others: each gets the same share of its dense size, or
its smallest form if that is larger, and the others share what is left (`shares`). The methods are those of `tables.py` and

    TT fixed    TT tables of one rank
    TT + rows   the same on a fifth of the bytes; on the rest, narrow rows of as many frequent ids as fit
                (`TableCompression(hot_rows="auto")`)
    TT adaptive, TT + rows adaptive
                the same at twice or one and a half times the budget, to which training shrinks them (`models.py`)
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.quality import tables as forms
from benchmarks.quality.tables import STD, Dense, DoesNotFit, Table, fit_
from comera_rec import TableCompression, TTEmbeddingBag, TTEmbeddingBagConfig
from comera_rec.training.start import start_from_vectors_, starting_rows

MIN_ROWS = 1000
PER_TABLE: dict[str, type[Table]] = {
    "hashing": forms.Hashed, "ROBE": forms.Robe, "CAFE": forms.HotAndHashed, "QR in parts": forms.Digits,
    "QR": forms.QuotientRemainder, "low rank": forms.LowRank, "mixed dim": forms.MixedDimension,
    "neighbors": forms.Neighbors,
}  # fmt: skip


def shares(rows: Sequence[int], dim: int, compression: float, method: type[Table]) -> list[int]:
    """Budgets of tables: the same share of each table's dense size, or its smallest form if that is larger.

    Raises:
        DoesNotFit: if the smallest forms exceed the budget together.
    """
    least = [method.least(m, dim) for m in rows]
    total, small, factor = sum(rows) * dim / compression, set[int](), 1 / compression
    while new := {k for k, m in enumerate(rows) if k not in small and int(m * dim * factor) < least[k]}:
        small |= new
        left = total - sum(least[k] for k in small)
        if left < 0 or len(small) == len(rows):
            raise DoesNotFit
        factor = left / sum(m * dim for k, m in enumerate(rows) if k not in small)
    return [least[k] if k in small else int(m * dim * factor) for k, m in enumerate(rows)]


class TT(Table):
    """A TT table, with or without hot rows."""

    def __init__(self, config: TTEmbeddingBagConfig, std: float = STD) -> None:
        super().__init__()
        self.bag = TTEmbeddingBag(
            config.num_embeddings, config.embedding_dim, shape=config.tt_shape(), hot_rows=config.hot_rows, std=std
        )

    def forward(self, ids: Tensor) -> Tensor:
        pooled: Tensor = self.bag(ids[:, None])
        return pooled

    def num_bytes(self) -> tuple[float, float]:
        """See the base class."""
        order = self.bag.row_order
        return super().num_bytes()[0], 0 if order is None else order.nbytes


class Embeddings(nn.Module):
    """The embedding tables of all fields; `tables` has the large ones, whose budget is theirs in dense form over `compression`.

    Args:
        counts: for each field [M], how often each id occurs in training.
        dim: N.
        method: "dense", a key of `PER_TABLE`, or a form of TT tables.
        compression: dense parameters of the large tables divided by the compressed ones.
        std: standard deviation of initial entries.

    Raises:
        DoesNotFit: if the method has no form this small.
    """

    starts: Tensor

    def __init__(self, counts: Sequence[Tensor], dim: int, method: str, compression: float, std: float = STD) -> None:
        super().__init__()
        self.dim = dim
        self.large = [f for f, count in enumerate(counts) if len(count) >= MIN_ROWS]
        self.budget = int(sum(len(counts[f]) for f in self.large) * dim / compression)
        small = [f for f in range(len(counts)) if f not in self.large]
        # All small tables share one: overhead of twenty separate ones would take half of a step.
        self.small = Dense(sum(len(counts[f]) for f in small), dim, std) if small else None
        self.register_buffer("starts", torch.tensor([0, *(len(counts[f]) for f in small)]).cumsum(0)[:-1], persistent=False)
        self.columns = [*small, *self.large]
        self.tables = nn.ModuleList(large_tables([counts[f] for f in self.large], dim, method, compression, std))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, self.columns]  # small tables first, so that all methods have the same order of fields
        few = len(self.columns) - len(self.large)
        large = [table(ids[:, few + k])[:, None] for k, table in enumerate(self.tables)]
        return torch.cat([self.small(ids[:, :few] + self.starts), *large] if self.small is not None else large, dim=1)

    def start_(self, vectors: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Let all tables start from vectors [M, K] of each field's ids."""
        rows = [starting_rows(of_field, len(count), self.dim) for of_field, count in zip(vectors, counts, strict=True)]
        if self.small is not None:
            small = self.columns[: len(self.columns) - len(self.large)]
            self.small.weight.data.copy_(torch.cat([rows[field] for field in small]))
        for field, table in zip(self.large, self.tables, strict=True):
            if isinstance(table, TT):
                start_from_vectors_(table.bag, vectors[field], counts[field])
            elif isinstance(table, Dense) and len(table.weight) == len(rows[field]):
                table.weight.data.copy_(rows[field])
            elif isinstance(table, Table):
                fit_(table, rows[field], counts[field])

    def num_bytes(self) -> tuple[float, float]:
        """Bytes of the large tables' values, and of their indices."""
        values, indices = zip(*(table.num_bytes() for table in self.tables if isinstance(table, Table)), strict=True)
        return sum(values), sum(indices)


def large_tables(counts: Sequence[Tensor], dim: int, method: str, compression: float, std: float) -> list[Table]:
    """Make tables of a method that take their budget together."""
    sizes = [len(count) for count in counts]
    if method == "dense":
        return [Dense(m, dim, std) for m in sizes]
    if method not in PER_TABLE:
        hot_rows: Literal["auto", 0] = "auto" if "rows" in method else 0
        configs = tt_configs(sizes, dim, compression, hot_rows)
        if "adaptive" in method:  # the modes chosen for the budget, at a larger size
            start = 1.5 if hot_rows else 2
            configs = tt_configs(sizes, dim, compression / start, hot_rows, configs[0].tt_shape().order)
        return [TT(config, std) for config in configs]
    kind = PER_TABLE[method]
    budgets = shares(sizes, dim, compression, kind)
    return [kind(count, dim, budget, std) for count, budget in zip(counts, budgets, strict=True)]


def tt_configs(
    sizes: Sequence[int], dim: int, compression: float, hot_rows: Literal["auto", 0] = 0, order: int | None = None
) -> list[TTEmbeddingBagConfig]:
    """Configs of TT tables of one rank that compress all tables together by at least `compression`."""
    tables = [EmbeddingBagConfig(name=f"t{i}", num_embeddings=m, embedding_dim=dim) for i, m in enumerate(sizes)]
    try:
        return TableCompression(compression=compression, min_rows=1, order=order, hot_rows=hot_rows).table_configs(tables)
    except ValueError:
        raise DoesNotFit from None
