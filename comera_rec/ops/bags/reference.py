"""The definition of bags of rows in plain torch, which tests compare every faster version with; it can be differentiated twice.

L ids, U unique rows of N columns, T tables.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.autocast import without_autocast
from comera_rec.ops.bags.table import Table
from comera_rec.ops.plan import LookupPlan


def pool(
    tables: Sequence[Table],
    plan: LookupPlan,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    mode: str,
    features: int,
    num_cols: int,
) -> Tensor:
    """Pool rows to [B, F * num_cols]; arguments as for `tt_bags`."""
    with without_autocast(offsets.device):
        rows = make_rows([table.cores for table in tables], [table.diagonals for table in tables], plan)[:, :num_cols]
        if any(table.hot for table in tables):
            rows = rows + hot_rows(tables, plan, num_cols)
        return pool_rows(rows, plan.inverse, offsets, weights, mode=mode, features=features)


def make_rows(cores: Sequence[Sequence[Tensor]], diagonals: Sequence[Sequence[Tensor]], plan: LookupPlan) -> Tensor:
    """Form the unique rows of a plan, [U, N]: E[i] = G_1[i_1] diag(D_1) G_2[i_2] ... G_d[i_d]."""
    slices, stacked = row_slices(plan), stack_tables(cores, diagonals)
    rows = stacked[0].new_ones(slices[0].shape[0], 1, 1)
    for numbers, core in zip(slices, stacked, strict=True):
        # The gradient of `F.embedding` is a sum in a fixed order on every device.
        chosen = F.embedding(numbers.clamp(min=0), core.flatten(1)).unflatten(1, core.shape[1:])
        rows = (rows @ chosen.flatten(2)).unflatten(2, core.shape[2:]).flatten(1, 2)
    return rows.flatten(1).masked_fill(slices[0][:, None] < 0, 0)


def hot_rows(tables: Sequence[Table], plan: LookupPlan, num_cols: int) -> Tensor:
    """Return what hot blocks add to the unique rows of a plan, [U, N]: A[i] diag(D) P to rows of a block, 0 to others."""
    ids = row_ids(plan)
    numbers, added = torch.arange(ids.shape[0], device=ids.device), tables[0].cores[0].new_zeros(ids.shape[0], num_cols)
    for t, table in enumerate(tables):
        in_table = (numbers >= plan.bounds[0, t]) & (numbers < plan.bounds[0, t + 1])
        first = -table.first
        for block in table.hot:
            end = first + block.rows.shape[1]
            in_block = in_table & (ids >= first) & (ids < end)
            chosen = block.rows[0, :, 0].index_select(0, (ids - first).clamp(0, block.rows.shape[1] - 1))
            block_rows = (torch.where(in_block[:, None], chosen, 0.0) * block.diagonal.flatten()) @ block.projection[:, 0, :, 0]
            added = torch.where(in_block[:, None], block_rows, added)
            first = end
    return added


def row_slices(plan: LookupPlan) -> list[Tensor]:
    """Return the slice of each core that each unique row uses, d times [U]; beyond the last row, the first core's are negative."""
    order, rows = plan.bounds.shape[0] - 3, plan.rows.long()
    if rows.device.type == "cpu" and not torch.compiler.is_compiling() and type(rows) is Tensor:
        rows = rows[:, : int(plan.bounds[0, -1])]  # where reading it doesn't wait for a device or break a trace
    p, q = rows
    leading = [p] if order < 3 else [torch.where(p < 0, p, half[p.clamp(min=0)]) for half in plan.left.long()]
    trailing = [q] if order < 4 else [half[q.clamp(min=0)] for half in plan.right.long().flip(0)]
    return [*leading, *trailing][:order]


def row_ids(plan: LookupPlan) -> Tensor:
    """Return the id of each unique row within its table, [U] int64; negative beyond the last row."""
    slices, firsts = row_slices(plan), plan.bounds[3:].long()
    numbers = torch.arange(slices[0].shape[0], device=slices[0].device)
    table = torch.searchsorted(plan.bounds[0, 1:-1].long().contiguous(), numbers, right=True)
    ids = torch.zeros_like(numbers)
    for of_core, first, mode in zip(slices, firsts[:, table], firsts.diff(dim=1)[:, table], strict=True):
        ids = ids * mode + of_core - first
    return torch.where(slices[0] < 0, -1, ids)


def stack_tables(cores: Sequence[Sequence[Tensor]], diagonals: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Stack the slices of all tables in d tensors (M_k, r_{k-1}, n_k, r_k), with the diagonal on their left multiplied in.

    Tables of smaller ranks are padded with zeros, which change no product.
    """
    stacked = []
    for k, tables in enumerate(zip(*cores, strict=True)):
        if k and diagonals[0]:
            tables = tuple(table[k - 1].view(-1, 1, 1, 1) * core for table, core in zip(diagonals, tables, strict=True))
        left, right = (max(core.shape[axis] for core in tables) for axis in (0, 3))
        padded = [F.pad(core, (0, right - core.shape[3], 0, 0, 0, 0, 0, left - core.shape[0])) for core in tables]
        stacked.append(torch.cat([core.transpose(0, 1) for core in padded]))
    return stacked


def pool_rows(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None = None, *, mode: str, features: int = 1
) -> Tensor:
    """Pool rows [U, N] by the number `inverse` [L] of each id's row: [B, F * N]."""
    # torch's embedding_bag has no second derivative; it only finds the rows that maxima come from.
    numbers = inverse.long()
    if mode == "max":
        # torch extends the last bag to the last id, whatever its offset; an additional bag takes the ids that are in no bag.
        ends = torch.cat([offsets, offsets.new_full((1,), numbers.shape[0])])
        chosen = torch.embedding_bag(rows.detach(), numbers, ends, mode=2, include_last_offset=True)[3][:-1]
        chosen = torch.where(offsets.diff()[:, None] > 0, chosen, rows.shape[0])
        bags = F.pad(rows, (0, 0, 0, 1)).gather(0, chosen)  # an empty bag is zero
    else:
        rows_LN = rows.index_select(0, numbers).to(torch.promote_types(rows.dtype, torch.float32))
        if weights is not None:
            rows_LN = rows_LN * weights[:, None]
        bag_of_L = torch.searchsorted(offsets, torch.arange(numbers.shape[0], device=offsets.device), right=True) - 1
        sums = rows_LN.new_zeros(offsets.shape[0], rows.shape[1])  # the last bag is of ids in no bag
        bags = sums.scatter_add(0, bag_of_L[:, None].expand(-1, rows.shape[1]), rows_LN)[:-1]
        if mode == "mean":
            bags = bags / offsets.diff().clamp(min=1)[:, None]
    return bags.to(rows.dtype).unflatten(0, (features, -1)).transpose(0, 1).flatten(1)
