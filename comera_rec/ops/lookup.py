"""Rows of tensor-train tables for a batch of ids.

U unique rows, T tables whose trains differ in row modes and ranks only. One call serves them all: slices of their k-th cores are
counted end to end, M_k together. Trains of two cores are read where they are, others are stacked along the row digit first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.ops.bags import Factors, pool_products, pool_rows
from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.ops.plan import LookupPlan, Product
from comera_rec.ops.stack import stack_cores


def check_ids(ids: Tensor, num_rows: int, table: str) -> None:
    """Check that a table has the rows a batch asks for.

    Native lookups answer an id out of range with an anonymous error, another table's row or a crash. On an accelerator the check is
    left out, because reading the extreme ids back would stall the device.

    Raises:
        ValueError: naming the table, the id and the limit, if an id is outside [0, num_rows).
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    first, last = (int(extreme) for extreme in ids.aminmax())
    if first < 0 or last >= num_rows:
        bad = first if first < 0 else last
        raise ValueError(f"id {bad} is out of range for {table}: its ids run from 0 to {num_rows - 1}; check the data's vocabulary")


Train = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Cores (r_{k-1}, m_k, n_k, r_k) and, between neighbours, the diagonals D_k (r_k); without diagonals they are ones."""


def tt_rows(trains: Sequence[Train], plan: LookupPlan, *, impl: str = "auto") -> Tensor:
    """Rows of the tables that trains stand for, without forming the tables.

    A row is a product of the leading and the trailing slices that its digits select. A plan lists every product once, on each level
    (row-level and index-level dedup): CoMERA, section 4.1 (arXiv 2405.14377).

    Args:
        trains: one a table, alike but for row modes and ranks.
        plan: from `plan_lookup`.
        impl: implementation of the products, see `gathered_matmul`.

    Returns:
        [U, n_1...n_d].
    """
    stacked = _stacked(trains)
    if isinstance(plan.rows, Tensor):
        return stacked[0][:, 0, :, 0].index_select(0, plan.rows.clamp(min=0))
    return gathered_matmul(*_operands(stacked, plan.rows, impl), impl).flatten(1)


def tt_bags(
    trains: Sequence[Train],
    plan: LookupPlan,
    offsets: Tensor,
    *,
    num_cols: int,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    features: int = 1,
    impl: str = "auto",
) -> Tensor:
    """Pooled bags of `tt_rows`: [B, F * N]; arguments as there and in `pool_products`."""
    if isinstance(plan.rows, Tensor):
        rows = tt_rows(trains, plan)[:, :num_cols]
        return pool_rows(rows, plan, offsets, mode=mode, per_sample_weights=per_sample_weights, features=features)
    a: Sequence[Tensor] | Factors
    if len(trains[0][0]) == 2:
        a, b = ([cores[k] for cores, _ in trains] for k in (0, 1))
        ranks = [rank for _, ranks in trains for rank in ranks]
    else:
        stacked, left, right = _stacked(trains), plan.rows.left, plan.rows.right
        a = [_part(stacked, left, impl).transpose(0, 1)] if isinstance(left, int) else _factors(stacked, left, impl)
        b, ranks = [_part(stacked, right, impl).transpose(0, 1)], []
    return pool_products(
        a,
        b,
        ranks,
        plan.rows.p,
        plan.rows.q,
        plan,
        offsets,
        num_cols=num_cols,
        mode=mode,
        per_sample_weights=per_sample_weights,
        features=features,
        impl=impl,
    )


def _stacked(trains: Sequence[Train]) -> list[Tensor]:
    """d tensors (M_k, r_{k-1}, n_k, r_k)."""
    cores, ranks = (list(zip(*each, strict=True)) for each in zip(*trains, strict=True))
    return [stack_cores(cores[0]), *(stack_cores(core, ranks[k] if ranks else None) for k, core in enumerate(cores[1:]))]


def _operands(stacked: Sequence[Tensor], product: Product, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a [.., r0 * n1, r], b [.., r, n2 * r1], p and q of a product of slices of neighbouring cores."""
    left, right = (_part(stacked, part, impl) for part in (product.left, product.right))
    return left.flatten(1, 2), right.flatten(2, 3), product.p, product.q


def _factors(stacked: Sequence[Tensor], product: Product, impl: str) -> Factors:
    """Of slices that `pool_products` makes by itself."""
    x, y = (_part(stacked, part, impl) for part in (product.left, product.right))
    return Factors(x.flatten(1, 2), y, product.p, product.q)


def _part(stacked: Sequence[Tensor], part: Product | int, impl: str) -> Tensor:
    """[V, r0, n, r1]: a core's slices, or products of several cores'."""
    if isinstance(part, int):
        return stacked[part]
    a, b, p, q = _operands(stacked, part, impl)
    cores = [stacked[k] for k in _cores(part)]
    width = math.prod([core.shape[2] for core in cores])
    return gathered_matmul(a, b, p, q, impl).reshape(len(p), cores[0].shape[1], width, cores[-1].shape[3])


def _cores(part: Product | int) -> list[int]:
    return [part] if isinstance(part, int) else _cores(part.left) + _cores(part.right)
