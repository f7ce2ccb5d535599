"""The definition of bags of rows in plain torch, which tests compare every faster version with; it can be differentiated twice.

L ids, U unique rows, T tables; n1, n2 columns of the halves of a row, r the rank between them.
"""

from __future__ import annotations

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
            rows = rows + hot_rows(tables, plan, num_cols)[: rows.shape[0]]
        return pool_rows(rows, plan.inverse, offsets, weights, mode=mode, features=features)


def make_rows(cores: Sequence[Sequence[Tensor]], diagonals: Sequence[Sequence[Tensor]], plan: LookupPlan) -> Tensor:
    """Form the unique rows of a plan, [U, N]: E[i] = G_1[i_1] diag(D_1) G_2[i_2] ... G_d[i_d]; each product of slices once."""
    return _multiply(*make_halves(cores, diagonals, plan), *_without_padding(plan.rows, plan, 0)).flatten(1)


def make_halves(
    cores: Sequence[Sequence[Tensor]], diagonals: Sequence[Sequence[Tensor]], plan: LookupPlan
) -> tuple[Tensor, Tensor]:
    """Form the leading halves [P, n1, r] and the trailing halves [Q, r, n2] of the rows of a plan."""
    stacked = stack_tables(cores, diagonals)
    left = stacked[0].flatten(1, 2)
    if len(stacked) == 1:
        return left, left.new_ones(len(cores), 1, 1)  # each table's only trailing half
    right = stacked[-1].flatten(2)
    if len(stacked) > 2:
        first, second = _without_padding(plan.left, plan, 1)
        _, _, n, rank = stacked[1].shape
        products = _multiply(left, stacked[1].flatten(2), first, second)
        left = products.view(products.shape[0], left.shape[1] * n, rank)
    if len(stacked) > 3:
        fourth, third = _without_padding(plan.right, plan, 2)
        _, rank, n, _ = stacked[2].shape
        products = _multiply(stacked[2].flatten(1, 2), right, third, fourth)
        right = products.view(products.shape[0], rank, n * right.shape[2])
    return left, right


def _multiply(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return a[p] @ b[q], zero and without gradient where p is negative.

    The gradient of `F.embedding` is a sum in a fixed order on every device.
    """
    chosen = [F.embedding(ids.clamp(min=0), each.flatten(1)).unflatten(1, each.shape[1:]) for each, ids in ((a, p), (b, q))]
    return torch.bmm(*chosen).masked_fill(p[:, None, None] < 0, 0)


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


def row_ids(plan: LookupPlan) -> Tensor:
    """Return the id of each unique row within its table, [L] int64; negative beyond the last row."""
    slices = plan.bounds[3:].long()
    order = slices.shape[0]
    cut = (order + 1) // 2
    numbers = torch.arange(plan.rows.shape[1], device=plan.rows.device)
    table = torch.searchsorted(plan.bounds[0, 1:-1].long().contiguous(), numbers, right=True)
    modes = slices.diff(dim=1)[:, table]
    p, q = plan.rows.long()
    digits = [p] if cut == 1 else list(plan.left.long()[:, p.clamp(min=0)])
    if order > 1:
        digits += [q] if order - cut == 1 else list(plan.right.long()[:, q.clamp(min=0)].flip(0))
    ids = torch.zeros_like(p)
    for digit, mode, first in zip(digits, modes, slices[:, table], strict=True):
        ids = ids * mode + digit - first
    return torch.where(p < 0, p, ids)


def _without_padding(numbers: Tensor, plan: LookupPlan, level: int) -> Tensor:
    """Cut off padding where its length can be read without waiting for a device or breaking a trace."""
    can_read = numbers.device.type == "cpu" and not torch.compiler.is_compiling() and type(numbers) is Tensor
    return numbers[:, : int(plan.bounds[level, -1])] if can_read else numbers


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
