"""Rows of tensor-train tables for a batch of ids.

U unique rows, T tables whose trains differ in row modes and ranks only. The tables' cores are stacked along the row digit, M_k
slices together, so that one call serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.ops.bags import pool_products, pool_rows
from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.ops.plan import LookupPlan, Product


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


def tt_rows(stacked: Sequence[Tensor], plan: LookupPlan, *, impl: str = "auto") -> Tensor:
    """Rows of the tables that stacked trains stand for, without forming the tables.

    A row is a product of the leading and the trailing slices that its digits select. A plan lists every product once, on each level
    (row-level and index-level dedup): CoMERA, section 4.1 (arXiv 2405.14377).

    Args:
        stacked: d cores (M_k, r_{k-1}, n_k, r_k) from `stack_cores`.
        plan: from `plan_lookup`.
        impl: implementation of the products, see `gathered_matmul`.

    Returns:
        [U, n_1...n_d].
    """
    if isinstance(plan.rows, Tensor):
        return stacked[0][:, 0, :, 0].index_select(0, plan.rows.clamp(min=0))
    return gathered_matmul(*_operands(stacked, plan.rows, impl), impl).flatten(1)


def tt_bags(
    stacked: Sequence[Tensor],
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
        rows = tt_rows(stacked, plan)[:, :num_cols]
        return pool_rows(rows, plan, offsets, mode=mode, per_sample_weights=per_sample_weights, features=features)
    left, right = plan.rows.left, _part(stacked, plan.rows.right, impl)
    return pool_products(
        stacked[left].flatten(1, 2) if isinstance(left, int) else _factors(stacked, left, impl),
        right.flatten(2, 3),
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


def _operands(stacked: Sequence[Tensor], product: Product, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a [.., r0 * n1, r], b [.., r, n2 * r1], p and q of a product of slices of neighbouring cores."""
    left, right = (_part(stacked, part, impl) for part in (product.left, product.right))
    return left.flatten(1, 2), right.flatten(2, 3), product.p, product.q


def _factors(stacked: Sequence[Tensor], product: Product, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [.., n, s], y [.., s, m, r], i and j of products that `pool_products` makes by itself."""
    x, y = (_part(stacked, part, impl) for part in (product.left, product.right))
    return x.flatten(1, 2), y, product.p, product.q


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
