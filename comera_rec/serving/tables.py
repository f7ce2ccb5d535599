"""Conversion of a trained collection's tables to the form used for serving.

M rows, N columns of a table, h rows that are formed in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import TTTable
from comera_rec.ops.served_bags import ServedTable, Slab
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.tt import first_rows

_WIDE = 0.75  # share of the columns: rows of wider slabs are formed in advance, because adding them would read about as much


def served_tables(collection: TTEmbeddingBagCollection | EmbeddingBagCollection) -> list[ServedTable]:
    """Convert the tables of a collection, one per feature in the order of its configs; features of one table share tensors."""
    tables = [_table(collection, config) for config in collection.embedding_bag_configs()]
    features = [config.feature_names for config in collection.embedding_bag_configs()]
    return [replace(table, name=name) for table, names in zip(tables, features, strict=True) for name in names]


def _table(collection: TTEmbeddingBagCollection | EmbeddingBagCollection, config: EmbeddingBagConfig) -> ServedTable:
    table = ServedTable(
        name=config.name,
        rows=config.num_embeddings,
        columns=config.embedding_dim,
        mean=config.pooling == PoolingType.MEAN,
        formed=torch.empty(0, config.embedding_dim),
    )
    dense = collection
    if isinstance(collection, TTEmbeddingBagCollection):
        if config.name in collection.tt_bags:
            cores, slabs = _folded(collection.tt_bag(config.name))
            table = replace(table, cores=cores, slabs=slabs)
            wide = [len(slab.rows) for slab in slabs if slab.rows.shape[1] >= _WIDE * table.columns]
            return with_formed(table, sum(wide))
        assert collection.dense_bags is not None
        dense = collection.dense_bags
    return replace(table, formed=dense.get_parameter(f"embedding_bags.{config.name}.weight").detach().float())


def _folded(table: TTTable) -> tuple[tuple[Tensor, ...], tuple[Slab, ...]]:
    """Return cores and slabs with the diagonals multiplied in.

    For each rank, the scale is spread evenly over the two cores beside it, so the numbers of a slice have similar sizes and fit few
    bits.
    """
    cores: list[Tensor] = [core.detach().float() for core in table.cores()]
    for k, diagonal in enumerate(table.rank_parameters(), start=1):
        scale = diagonal.detach().float().flatten()
        before, after = cores[k - 1].pow(2).sum((0, 1, 2)).sqrt(), cores[k].pow(2).sum((1, 2, 3)).sqrt()
        balance = (after * scale.abs() / before).sqrt()
        balance = torch.where(balance.isfinite() & (balance > 0), balance, 1.0)
        cores[k - 1 : k + 1] = cores[k - 1] * balance, cores[k] * (scale / balance)[:, None, None, None]
    slabs = []
    for block in table.hot_blocks():
        rows, projection, scale = (part.detach().float() for part in block.block())
        slabs.append(Slab(rows=rows[0, :, 0].contiguous(), columns=scale.view(-1, 1) * projection[:, 0, :, 0]))
    return tuple(core.permute(1, 0, 3, 2).contiguous() for core in cores), tuple(slabs)


def with_formed(table: ServedTable, count: int) -> ServedTable:
    """Return the table with its first `count` rows formed in advance; slabs covered by them become empty."""
    count = min(count, table.rows)
    if count <= len(table.formed):
        return table
    rows = first_rows([core.permute(1, 0, 3, 2) for core in table.cores], table.row_modes, count, table.columns).contiguous()
    rows[: len(table.formed)] = table.formed
    slabs, first = [], 0
    for slab in table.slabs:
        begin, beyond = max(first, len(table.formed)), first + len(slab.rows)
        if begin < count:
            rows[begin:beyond] += slab.rows[begin - first : count - first] @ slab.columns
        slabs.append(slab if beyond > count else Slab(rows=slab.rows[:, :0], columns=slab.columns[:0]))
        first = beyond
    if count == table.rows:
        return replace(table, formed=rows, cores=(), slabs=())
    return replace(table, formed=rows, slabs=tuple(slabs))


def work_of(table: ServedTable) -> int:
    """Count the multiply-adds of forming a row."""
    work, columns = 0, 1
    for core in table.cores:
        work += columns * core[0].numel()
        columns *= core.shape[3]
    return work + max((slab.rows.shape[1] * table.columns for slab in table.slabs), default=0)


def expand(tables: Sequence[ServedTable], counts: Sequence[Tensor], budget: int, row_bytes: int) -> list[ServedTable]:
    """Form rows of frequent ids in advance, those that save the most multiply-adds first.

    Args:
        tables: tables with the same number of columns.
        counts: how often ids 0, 1, ... of each table occur, for any number of ids; falling from id 1 on.
        budget: bytes for all these rows, in addition to those formed already.
        row_bytes: bytes of a row.
    """
    saved = [
        count[len(table.formed) : table.rows].double().cummin(0).values * work_of(table) if table.cores else count[:0].double()
        for table, count in zip(tables, counts, strict=True)
    ]
    ends = torch.tensor([len(each) for each in saved]).cumsum(0)
    chosen = torch.cat(saved).topk(min(budget // row_bytes, int(ends[-1]))).indices
    more = torch.bincount(torch.searchsorted(ends, chosen, right=True), minlength=len(tables)).tolist()
    return [with_formed(table, len(table.formed) + count) if count else table for table, count in zip(tables, more, strict=True)]
