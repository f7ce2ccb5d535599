"""Conversion of trained tables to the form used for serving.

M rows, N columns of a table.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from comera_rec.nn import TTTable
from comera_rec.ops.served_bags import ServedTable, Slab
from comera_rec.tt import first_rows

_WIDE = 0.75  # share of the columns: rows of wider slabs are formed in advance, because adding them would read about as much


def served_table(weights: TTTable | Tensor, *, name: str = "", mean: bool = False) -> ServedTable:
    """Convert a TT table, or the rows of a dense one; bags of the result are averaged if `mean`."""
    if isinstance(weights, Tensor):
        formed = weights.detach().float()
        return ServedTable(name=name, rows=len(formed), columns=formed.shape[1], mean=mean, formed=formed)
    cores, slabs = _folded(weights)
    rows, columns = weights.num_embeddings, weights.embedding_dim
    wide = list(itertools.takewhile(lambda slab: slab.rows.shape[1] >= _WIDE * columns, slabs))
    added = [slab.rows @ slab.columns for slab in wide]
    formed = torch.cat([torch.empty(0, columns), *added])
    if wide:
        formed += first_rows([core.permute(1, 0, 3, 2) for core in cores], weights.shape.row_shape, len(formed), columns)
        slabs = (*(Slab(rows=slab.rows[:, :0], columns=slab.columns[:0]) for slab in wide), *slabs[len(wide) :])
    if len(formed) == rows:
        cores, slabs = (), ()
    return ServedTable(
        name=name, rows=rows, columns=columns, mean=mean, formed=formed, cores=cores, slabs=slabs, row_order=weights.lookup_order
    )


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
