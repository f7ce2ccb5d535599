"""The definition of bags for requests in plain torch, which tests compare the fast operator with."""

import math

import torch
from torch import Tensor

from comera_rec.ops.served_bags.served_table import ServedTable
from comera_rec.ops.served_bags.storage import Packed, unpack
from comera_rec.tt import row_digits
from data_pipeline.errors import UserError


def served_bags(
    packed: Packed,
    values: Tensor,
    lengths: Tensor,
    columns: int,
    *,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return [B, F, N] or [bags, N]; arguments as for `comera_rec.ops.served_bags.served_bags`."""
    tables = unpack(*packed, columns)
    numbers = [len(lengths) // len(tables)] * len(tables) if counts is None else counts.tolist()
    features, first = list[Tensor](), 0
    for f, (table, bag_lengths) in enumerate(zip(tables, lengths[: sum(numbers)].split(numbers), strict=True)):
        ids = values[first : first + int(bag_lengths.sum())]
        factors = torch.ones(len(ids)) if weights is None else weights[first : first + len(ids)]
        first += len(ids)
        invalid = ids[(ids < 0) | (ids >= table.rows)]
        if len(invalid):
            raise UserError(f"id {int(invalid[0])} is out of range for feature {f}: its ids run from 0 to {table.rows - 1}")
        bags = torch.repeat_interleave(torch.arange(numbers[f]), bag_lengths)
        pooled = torch.zeros(numbers[f], columns).index_add(0, bags, rows_of(table, ids) * factors[:, None])
        features.append(pooled / bag_lengths.clamp(min=1)[:, None] if table.mean else pooled)
    if counts is None:
        return torch.stack(features, dim=1)
    return torch.cat([*features, torch.zeros(len(lengths) - sum(numbers), columns)])


def rows_of(table: ServedTable, ids: Tensor) -> Tensor:
    """Return the rows [L, N] of ids: formed in advance, or G_1[i_1] ... G_d[i_d] + A[i] P."""
    is_formed = ids < len(table.formed)
    rows = torch.empty(len(ids), table.columns)
    rows[is_formed] = table.formed[ids[is_formed]]
    if table.cores:
        rows[~is_formed] = _multiplied(table, ids[~is_formed])
    return rows


def _multiplied(table: ServedTable, ids: Tensor) -> Tensor:
    rows = torch.ones(len(ids), 1, 1)  # [L, columns so far, rank]
    for core, digit in zip(table.cores, row_digits(ids, table.row_modes), strict=True):
        rows = torch.einsum("lck,lkrn->lcnr", rows, core[digit]).flatten(1, 2)
    rows = rows.reshape(len(ids), math.prod(table.col_modes))[:, : table.columns].clone()
    first = 0
    for slab in table.slabs:
        in_slab = (ids >= first) & (ids < first + len(slab.rows))
        rows[in_slab] += slab.rows[ids[in_slab] - first] @ slab.columns
        first += len(slab.rows)
    return rows
