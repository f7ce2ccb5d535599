"""Random tables, and reference bags of them, for tests of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag
from comera_rec.ops import LookupPlan, plan_lookup, tt_bags
from comera_rec.tt import TTShape

every_impl = pytest.mark.parametrize("impl", ["auto", "reference"])
every_order = pytest.mark.parametrize("order", [2, 3, 4])

# Relative to the largest value: float32's for sums of thousands of products; for others half the last digit, and the sums'.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}


def make_tables(
    row_shapes: Sequence[Sequence[int]],
    col_shape: Sequence[int],
    ranks: Sequence[int] | Sequence[Sequence[int]],
    num_cols: int | None = None,
    dtype: torch.dtype = torch.float32,
    hot_rows: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[TTEmbeddingBag]:
    """Build tables that differ in row modes and hot rows, and in ranks if these are given for each, with random rank parameters."""
    tables = []
    for t, row_shape in enumerate(row_shapes):
        table_ranks = ranks[t] if ranks and not isinstance(ranks[0], int) else ranks
        shape = TTShape(tuple(row_shape), tuple(col_shape), tuple(table_ranks))  # type: ignore[arg-type]
        hot = hot_rows[t] if hot_rows else ()
        table = TTEmbeddingBag(shape.num_rows, num_cols or shape.num_cols, shape=shape, dtype=dtype, hot_rows=hot)
        for block in table.hot_blocks():
            nn.init.normal_(block.core_0)  # it starts at zero
        for parameter in (rank for module in (table, *table.hot_blocks()) for rank in module.rank_parameters()):
            nn.init.uniform_(parameter, 0.5, 1.5)
        tables.append(table)
    return tables


def plan_of(tables: list[TTEmbeddingBag], ids: list[Tensor], impl: str = "auto") -> LookupPlan:
    return plan_lookup(ids, [table.shape.row_shape for table in tables], impl=impl)


def pool(
    tables: list[TTEmbeddingBag],
    ids: list[Tensor],
    offsets: Tensor,
    *,
    impl: str = "auto",
    plan: LookupPlan | None = None,
    **arguments: Any,
) -> Tensor:
    plan = plan or plan_of(tables, ids, impl)
    cores_and_diagonals = [table.forward_parameters() for table in tables]
    return tt_bags(cores_and_diagonals, plan, offsets, num_cols=tables[0].embedding_dim, impl=impl, **arguments)


def pool_by_definition(tables: list[TTEmbeddingBag], ids: list[Tensor], offsets: Tensor, **arguments: Any) -> Tensor:
    """Pool bags of tables that are too large to be dense; `test_any_bags` compares it with dense ones."""
    return pool(tables, ids, offsets, **{**arguments, "impl": "reference"})


def pool_dense(
    tables: list[TTEmbeddingBag], ids: list[Tensor], offsets: Tensor, *, features: int = 1, mode: str = "sum", **arguments: Any
) -> Tensor:
    rows = torch.cat([table.dense_matrix()[table_ids.long()] for table, table_ids in zip(tables, ids, strict=True)])
    # Torch's last bag extends to the last id, so an additional bag takes the ids that are in none.
    pooled = F.embedding_bag(torch.arange(len(rows)), rows, offsets.long(), mode=mode, **arguments)[:-1]
    return pooled.unflatten(0, (features, -1)).transpose(0, 1).flatten(1)
