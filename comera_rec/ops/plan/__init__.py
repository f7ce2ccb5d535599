"""The plan of a lookup: which rows a batch needs, and which products of slices form them.

L ids, U unique rows, T tables of d cores each, M_k slices of all tables' k-th cores together. A table's cores are cut into a
leading half, its first (d + 1) // 2 cores, and a trailing half; a row is a product of one slice of each half.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comera_rec.ops.native import ops
from comera_rec.ops.plan import reference
from comera_rec.ops.plan.pairs import PairPlan, plan_pairs
from data_pipeline.errors import UserError


class LookupPlan(NamedTuple):
    """The rows and products of slices that a batch needs; operators take the fields in this order.

    It depends only on the ids and row modes, not on the cores' values or ranks, so it can be made ahead of time. Sizes follow from
    the number of ids; entries beyond the actual rows or products are -1. Slices are numbered through all tables.
    """

    inverse: Tensor
    """[L]: number of each id's unique row."""
    order: Tensor
    """[L]: positions of ids sorted by row; those of row u are order[starts[u]:starts[u + 1]]."""
    starts: Tensor
    """[L + 1]: start of each row in `order`; L beyond the last row."""
    rows: Tensor
    """[2, L]: for each unique row, by table and id, the numbers p and q of its two factors. p is a slice of the first core or, if
    d >= 3, a product of `left`; q is a slice of the last core or, if d = 4, a product of `right`. If d = 1, its slice and 0."""
    left: Tensor
    """[2, L] if d >= 3, else [2, 0]: for each unique leading half, its slices of the first and the second core."""
    right: Tensor
    """[2, L] if d = 4, else [2, 0]: for each unique trailing half, its slices of the fourth and the third core."""
    bounds: Tensor
    """[3 + d, T + 1]: for each table, the number of its first row, of its first products of `left` and of `right`, and of its first
    slice of each core; in the last column, the total counts."""

    @property
    def num_ids(self) -> int:
        """L."""
        return self.inverse.shape[0]


def plan_lookup(
    ids: Sequence[Tensor],
    row_shapes: Sequence[Sequence[int]],
    num_embeddings: Sequence[int] | None = None,
    *,
    impl: str = "auto",
) -> LookupPlan | PairPlan:
    """Find the unique rows of a batch over several tables, and their unique leading and trailing halves.

    Args:
        ids: row ids of each table, int32 or int64, of any shape.
        row_shapes: row modes (m_1..m_d) of each table; d is from 1 to 4 and the same for all.
        num_embeddings: rows of each table; default m_1...m_d.
        impl: "cpu", which checks ids; "reference", in which each id has a row of its own; or "triton", a `PairPlan` for GPUs, which
            checks them there. "auto" is "cpu" for tables of two to four cores on CPU.

    Returns:
        The plan for the ids of all tables, flattened and concatenated.

    Raises:
        ValueError: for ids of another type; with "cpu", also for ids out of range.
    """
    order = len(row_shapes[0])
    num_embeddings = [math.prod(shape) for shape in row_shapes] if num_embeddings is None else list(num_embeddings)
    for t, table in enumerate(ids):
        if table.dtype not in (torch.int32, torch.int64):
            raise UserError(f"ids[{t}] has dtype {table.dtype}: give int32 or int64")
    if impl == "triton":
        return plan_pairs([table.flatten() for table in ids], row_shapes, num_embeddings)
    if order > 1 and impl in ("auto", "cpu") and ids[0].device.type in ("cpu", "meta"):
        return LookupPlan(
            *ops.plan_lookup([table.contiguous() for table in ids], num_embeddings, [m for s in row_shapes for m in s])
        )
    return LookupPlan(*reference.plan_lookup([table.flatten() for table in ids], row_shapes))
