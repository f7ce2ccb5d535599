"""Bags of rows on CPU, by the operators of `csrc`, which add rows to bags and gradients to slices straight from registers.

T tables of d cores, L ids, F features of B bags each, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.bags.table import Table
from comera_rec.ops.bags.updates import Updates, find_updates
from comera_rec.ops.native import ops
from comera_rec.ops.plan import LookupPlan
from comera_rec.tt import slice_major

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAN = len(LookupPlan._fields)


def pool(
    tables: Sequence[Table],
    plan: LookupPlan,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    mode: str,
    features: int,
    num_cols: int,
    update: bool = True,
) -> Tensor:
    """Pool rows to [B, F * num_cols] float32; arguments as for `tt_bags`, weights in float32."""
    order = len(tables[0].cores)
    # Table by table, then A and P of each hot block; diagonals likewise, or none if all of them are ones.
    cores = [slice_major(core, k, order) for table in tables for k, core in enumerate(table.cores)]
    diagonals = [diagonal.contiguous() for table in tables for diagonal in table.diagonals]
    blocks = [block for table in tables for block in table.hot]
    if blocks and not diagonals:
        diagonals = [core.new_ones(core.shape[3]) for table in tables for core in table.cores[:-1]]
    for block in blocks:
        # A contiguous core of a block is slice-major, because its other sizes are 1; this check is the cheapest.
        cores += [core if core.is_contiguous() else slice_major(core, k, 2) for k, core in enumerate(block[:2])]
        diagonals.append(block.diagonal.contiguous())
    hot_blocks, first_rows = ([len(table.hot) for table in tables], [table.first for table in tables]) if blocks else ([], [])
    settings = (mode == "mean", features, num_cols, hot_blocks, first_rows)
    # Cores that had to be copied into another layout have no optimizer.
    may_update = update and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    updates = find_updates(cores, diagonals) if may_update else None
    bags: Tensor
    if updates is not None:
        diagonals = diagonals if updates.diagonals is None else updates.diagonals
        # Needs a gradient, so that autograd calls a backward whose other inputs need none.
        handle = torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)
        bags = _UpdatingPool.apply(settings, updates, handle, offsets, weights, len(diagonals), *diagonals, *plan)
    else:
        bags = ops.pool(cores, diagonals, list(plan), offsets, weights, *settings)
    return bags


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    ctx.counts = len(cores), len(diagonals)
    ctx.save_for_backward(offsets, weights, *cores, *diagonals, *plan)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    num_cores, num_diagonals = ctx.counts
    cores, diagonals, (weights,) = _split(_gradients(ctx, grad), num_cores, num_diagonals)
    lists: list[None] | None = None if ctx.settings[-1] else []  # torch mistakes an empty list of numbers for one of tensors
    return cores, diagonals, [None] * _PLAN, None, weights, None, None, None, lists, lists


@torch.autograd.function.once_differentiable
def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of cores, then of diagonals, then of weights."""
    offsets, weights, *tensors = ctx.saved_tensors
    cores, diagonals, plan = _split(tensors, *ctx.counts)
    core_gradients, diagonal_gradients, weight_gradients = ops.pool_backward(
        grad.float().contiguous(), cores, diagonals, plan, offsets, weights, *ctx.settings
    )
    return *core_gradients, *_like(diagonals, diagonal_gradients), None if weights is None else weight_gradients


torch.library.register_autograd("comera_rec::pool", _differentiate, setup_context=_setup_context)


class _UpdatingPool(torch.autograd.Function):
    """Bags whose backward applies the optimizers of cores to the slices that the batch used."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Any,
        updates: Updates,
        handle: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.settings, ctx.updates, ctx.count = settings, updates, count
        ctx.save_for_backward(offsets, weights, *tensors)
        bags: Tensor = ops.pool(updates.cores, list(tensors[:count]), list(tensors[count:]), offsets, weights, *settings)
        return bags

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        offsets, weights, *tensors = ctx.saved_tensors
        _, diagonals, plan = _split(tensors, 0, ctx.count)
        updates: Updates = ctx.updates
        diagonal_gradients, weight_gradients = ops.pool_backward_update(
            grad.float().contiguous(), updates.cores, diagonals, plan, offsets, weights, *ctx.settings, *updates.begin_step()
        )
        weight_gradients = None if weights is None else weight_gradients
        diagonal_gradients = [None] * len(diagonals) if updates.diagonals is not None else _like(diagonals, diagonal_gradients)
        return None, None, None, None, weight_gradients, None, *diagonal_gradients, *[None] * len(plan)


def _split(tensors: Sequence[Tensor], num_cores: int, num_diagonals: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    beyond = num_cores + num_diagonals
    return list(tensors[:num_cores]), list(tensors[num_cores:beyond]), list(tensors[beyond:])


def _like(diagonals: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [gradient.to(diagonal.dtype).view_as(diagonal) for gradient, diagonal in zip(gradients, diagonals, strict=False)]
