"""The plan of a lookup: which rows a batch needs, and which products of slices make them.

L ids, U unique rows, T tables of d cores each, M_k slices of all tables' k-th cores together. A table's cores are cut into a
leading half, of its first (d + 1) // 2 cores, and a trailing one; a row is a product of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from comera_rec.ops.native import ops
from comera_rec.ops.plan import reference


@dataclass(frozen=True)
class LookupPlan:
    """What to compute for a batch.

    It depends on the ids and the row modes alone, not on the cores' values or ranks, so it can be made ahead of time. Sizes follow
    from the number of ids; what is beyond the rows or products that there are is -1. Numbers of slices count over all tables.
    """

    inverse: Tensor
    """[L]: which unique row each id is."""
    order: Tensor
    """[L]: ids sorted by the row they are; those of row u are order[starts[u]:starts[u + 1]]."""
    starts: Tensor
    """[L + 1]; L beyond the last row."""
    rows: Tensor
    """[2, L]: per unique row, ordered by table and id, its p and q: a slice of the first core or, of d >= 3, a product of `left`;
    and a slice of the last core or, of d = 4, a product of `right`. For d = 1 its slice, and 0."""
    left: Tensor
    """[2, L] of d >= 3, else [2, 0]: per unique leading half its slices of the first and of the second core."""
    right: Tensor
    """[2, L] of d = 4, else [2, 0]: per unique trailing half its slices of the fourth and of the third core."""
    bounds: Tensor
    """[3 + d, T + 1]: per table its first row, its first product of `left`, of `right`, and its first slice of each core; and the
    numbers of all."""

    @property
    def tensors(self) -> list[Tensor]:
        """The fields, in order, as operators take them."""
        return [getattr(self, field.name) for field in fields(self)]


def plan_lookup(
    ids: Sequence[Tensor],
    row_shapes: Sequence[Sequence[int]],
    num_embeddings: Sequence[int] | None = None,
    *,
    impl: str = "auto",
    parallel: bool = True,
) -> LookupPlan:
    """Find the unique rows of a batch over several tables, and the unique leading and trailing digits among them.

    Args:
        ids: per table its row ids, int32 or int64, of any shape.
        row_shapes: per table the modes (m_1..m_d), d from 1 to 4 and alike for all.
        num_embeddings: per table how many rows it has; default m_1...m_d.
        impl: "cpu", which checks ids, or "reference", which does not; "auto" is the former for tables of two to four cores on CPU.
        parallel: on torch's threads (on CPU). Give False in a thread beside one that trains: two teams of threads on the same cores
            wait for each other, for ten times as long as the work takes.

    Returns:
        The plan. Its ids are those of all tables, flattened and laid end to end.

    Raises:
        ValueError: for ids of another type, or out of range (on CPU).
    """
    order = len(row_shapes[0])
    num_embeddings = [math.prod(shape) for shape in row_shapes] if num_embeddings is None else list(num_embeddings)
    for t, table in enumerate(ids):
        if table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids[{t}] has dtype {table.dtype}: give int32 or int64")
    if order > 1 and impl != "reference" and ids[0].device.type in ("cpu", "meta"):
        return LookupPlan(
            *ops.plan_lookup([table.contiguous() for table in ids], num_embeddings, [m for s in row_shapes for m in s], parallel)
        )
    return LookupPlan(*reference.plan_lookup([table.flatten() for table in ids], row_shapes))
