"""Tables in the form that serves: nothing left to multiply that does not depend on the request.

M rows, N columns, d cores of m_k slices, r_k the ranks between them, h rows that are formed in advance, k the width of a hot block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import TTTable
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.tt import first_rows


@dataclass(frozen=True, kw_only=True)
class HotSlab:
    """Rows that are added to those of the cores for ids from `first` on: rows [h, k] times columns [k, N]."""

    first: int
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, kw_only=True)
class ServingTable:
    """A table of one feature.

    Attributes:
        rows, columns: M and N.
        mean: whether bags are averaged; else summed.
        formed: [h, N], read for ids below h. A dense table has all of its rows here, and no cores.
        cores: core k is [m_k, r_{k-1}, n_k, r_k], the diagonals multiplied in.
        hot: slabs one after the other from row 0 on.
    """

    name: str
    rows: int
    columns: int
    mean: bool
    formed: Tensor
    cores: tuple[Tensor, ...] = ()
    hot: tuple[HotSlab, ...] = ()

    @property
    def row_modes(self) -> tuple[int, ...]:
        """(m_1..m_d)."""
        return tuple(core.shape[0] for core in self.cores)

    @property
    def col_modes(self) -> tuple[int, ...]:
        """(n_1..n_d)."""
        return tuple(core.shape[2] for core in self.cores)

    @property
    def work(self) -> int:
        """Multiply-adds that forming a row takes."""
        work, columns = 0, 1
        for core in self.cores:
            work += columns * core[0].numel()
            columns *= core.shape[2]
        return work + max((slab.rows.shape[1] * self.columns for slab in self.hot), default=0)

    def form(self, count: int) -> ServingTable:
        """The table with its first `count` rows formed in advance."""
        if count <= len(self.formed):
            return self
        rows = first_rows([core.transpose(0, 1) for core in self.cores], self.row_modes, count, self.columns).contiguous()
        for slab in self.hot:
            span = slice(slab.first, min(count, slab.first + len(slab.rows)))
            if span.start < count:
                rows[span] += slab.rows[: span.stop - span.start] @ slab.columns
        if count < self.rows:
            return replace(self, formed=rows)
        return replace(self, formed=rows, cores=(), hot=())


def serving_tables(collection: TTEmbeddingBagCollection | EmbeddingBagCollection) -> list[ServingTable]:
    """The tables of a collection, one for each feature in the order of its configs; tensors of one table are shared."""
    return [
        replace(table, name=feature)
        for config in collection.embedding_bag_configs()
        for table in [_table(collection, config)]
        for feature in config.feature_names
    ]


def _table(collection: TTEmbeddingBagCollection | EmbeddingBagCollection, config: EmbeddingBagConfig) -> ServingTable:
    is_tt = isinstance(collection, TTEmbeddingBagCollection)
    dense = collection.dense_bags if isinstance(collection, TTEmbeddingBagCollection) else collection
    mean = config.pooling == PoolingType.MEAN
    sizes = {"name": config.name, "rows": config.num_embeddings, "columns": config.embedding_dim, "mean": mean}
    if isinstance(collection, TTEmbeddingBagCollection) and config.name in collection.tt_bags:
        cores, hot = _fold(collection.tt_bag(config.name))
        return ServingTable(**sizes, formed=torch.empty(0, config.embedding_dim), cores=cores, hot=hot)
    assert dense is not None, is_tt
    return ServingTable(**sizes, formed=dense.get_parameter(f"embedding_bags.{config.name}.weight").detach().float())


def _fold(table: TTTable) -> tuple[tuple[Tensor, ...], tuple[HotSlab, ...]]:
    """Cores and hot slabs with their diagonals multiplied in.

    Rank by rank a diagonal and the norms of its neighbours are spread evenly over the two, so that numbers of a slice are of one
    size: which is what few bits can hold.
    """
    cores = [core.detach().float() for core in table.cores()]
    for k, diagonal in enumerate(table.rank_parameters(), start=1):
        left, right = cores[k - 1], cores[k]
        scale = diagonal.detach().float()
        norms = left.pow(2).sum((0, 1, 2)).sqrt(), right.pow(2).sum((1, 2, 3)).sqrt()
        balance = (norms[1] * scale.abs() / norms[0]).sqrt().nan_to_num(nan=1.0, posinf=1.0)
        balance = torch.where(balance > 0, balance, 1.0)
        cores[k - 1] = left * balance
        cores[k] = right * (scale / balance)[:, None, None, None]
    hot = []
    for block in table.hot_blocks():
        rows, columns, diagonal = (part.detach().float() for part in block.block())
        hot.append(HotSlab(first=block.first, rows=rows[0, :, 0], columns=diagonal[:, None] * columns[:, 0, :, 0]))
    return tuple(core.transpose(0, 1).contiguous() for core in cores), tuple(hot)


def formed_counts(tables: Sequence[ServingTable], counts: Sequence[Sequence[int]], budget: int, row_bytes: int) -> list[int]:
    """How many rows of each table to form in advance: those that save the most work per byte.

    Args:
        tables: with cores or without.
        counts: per table how often its ids 0, 1, ... are asked for, as far as known; from 1 on falling.
        budget: bytes for all of them.
        row_bytes: of a row.
    """
    saved = [
        torch.tensor(list(known)[: table.rows], dtype=torch.float64).cummin(0).values * table.work
        if table.cores and len(known)
        else torch.empty(0, dtype=torch.float64)
        for table, known in zip(tables, counts, strict=True)
    ]
    chosen = torch.cat(saved).topk(min(budget // row_bytes, sum(map(len, saved)))).indices
    ends = torch.tensor([0, *map(len, saved)]).cumsum(0)
    owners = torch.searchsorted(ends, chosen, right=True) - 1
    found: list[int] = torch.bincount(owners, minlength=len(tables)).tolist()
    return found


def core_bytes(table: ServingTable) -> int:
    """Numbers that the cores hold."""
    return sum(math.prod(core.shape) for core in table.cores)
