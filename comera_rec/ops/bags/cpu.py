"""Bags of rows on CPU, by the operators of `csrc`, which add rows to bags and gradients to slices straight from registers.

T tables of d cores, L ids, F features of B bags each, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.bags.updates import Updates
from comera_rec.ops.native import ops
from comera_rec.ops.plan import LookupPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAN = len(fields(LookupPlan))


def pool(
    cores: Sequence[Tensor],
    diagonals: Sequence[Tensor],
    plan: LookupPlan,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    mean: bool,
    features: int,
    num_cols: int,
    hot: Sequence[int] = (),
    updates: Updates | None = None,
) -> Tensor:
    """Pool by sum or mean: [B, F * num_cols] float32, differentiable in cores, diagonals and weights.

    Args:
        cores: T * d `slice_major` cores, table by table; then A and P of each hot block.
        diagonals: T * (d - 1) rank parameters, or none if they are ones; then D of each hot block.
        plan, offsets, features, num_cols: as for `tt_bags`.
        weights: [L] float32, for sums.
        hot: for each table its number of hot blocks and the row that id 0 refers to; empty if no table has hot blocks.
        updates: updates of the cores in backward, instead of gradients.
    """
    settings = (mean, features, num_cols, list(hot))
    if updates is not None:
        if updates.diagonals is not None:
            diagonals = updates.diagonals
        bags: Tensor = _UpdatingPool.apply(
            settings, updates, _handle(), offsets, weights, len(diagonals), *diagonals, *plan.tensors
        )
    else:
        pool = _pool_in_transforms if torch._C._are_functorch_transforms_active() else ops.pool
        bags = pool(list(cores), list(diagonals), plan.tensors, offsets, weights, *settings)
    return bags


def _handle() -> Tensor:
    """Return a tensor that needs a gradient, so that autograd calls a backward whose other inputs need none."""
    return torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    ctx.counts = len(cores), len(diagonals)
    ctx.save_for_backward(offsets, weights, *cores, *diagonals, *plan)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    num_cores, num_diagonals = ctx.counts
    cores, diagonals, (weights,) = _split(_gradients(ctx, grad), num_cores, num_diagonals)
    hot: list[None] | None = None if ctx.settings[-1] else []  # torch mistakes an empty list of numbers for one of tensors
    return cores, diagonals, [None] * _PLAN, None, weights, None, None, None, hot


@torch.autograd.function.once_differentiable
def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients_of(ctx.settings, *ctx.counts, grad, *ctx.saved_tensors)


def _gradients_of(
    settings: Any, num_cores: int, num_diagonals: int, grad: Tensor, offsets: Tensor, weights: Tensor | None, *tensors: Tensor
) -> tuple[Any, ...]:
    """Return the gradients of cores, then of diagonals, then of weights."""
    cores, diagonals, plan = _split(tensors, num_cores, num_diagonals)
    core_gradients, diagonal_gradients, weight_gradients = ops.pool_backward(
        grad.float().contiguous(), cores, diagonals, plan, offsets, weights, *settings
    )
    diagonal_gradients = [gradient.to(diagonal.dtype) for gradient, diagonal in zip(diagonal_gradients, diagonals, strict=False)]
    return *core_gradients, *diagonal_gradients, None if weights is None else weight_gradients


torch.library.register_autograd("comera_rec::pool", _differentiate, setup_context=_setup_context)


def _pool_in_transforms(
    cores: list[Tensor], diagonals: list[Tensor], plan: list[Tensor], offsets: Tensor, weights: Tensor | None, *settings: Any
) -> Tensor:
    bags: Tensor = _Pool.apply(settings, len(cores), len(diagonals), offsets, weights, *cores, *diagonals, *plan)
    return bags


class _Pool(torch.autograd.Function):
    """`pool` for torch.func, which ignores the gradients registered with torch.library."""

    @staticmethod
    def forward(
        settings: Any, num_cores: int, num_diagonals: int, offsets: Tensor, weights: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            bags: Tensor = ops.pool(*_split(tensors, num_cores, num_diagonals), offsets, weights, *settings)
        return bags

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.settings, *ctx.counts = inputs[:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *gradients, weight_gradients = _Gradients.apply(ctx.settings, *ctx.counts, grad, *ctx.saved_tensors)
        return None, None, None, None, weight_gradients, *gradients, *[None] * _PLAN


class _Gradients(torch.autograd.Function):
    """Gradients under torch.func, which ignores `once_differentiable`: without this, second derivatives would silently be zero."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, ...]:
        return _gradients_of(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("bags of TT tables have no second derivative; use impl='reference' to differentiate twice")


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
        diagonals, plan = list(tensors[: ctx.count]), list(tensors[ctx.count :])
        updates: Updates = ctx.updates
        diagonal_gradients, weight_gradients = ops.pool_backward_update(
            grad.float().contiguous(), updates.cores, diagonals, plan, offsets, weights, *ctx.settings, *updates.begin_step()
        )
        weight_gradients = None if weights is None else weight_gradients
        if updates.diagonals is not None:
            diagonal_gradients = [None] * len(diagonals)
        else:
            diagonal_gradients = [
                gradient.to(diagonal.dtype) for gradient, diagonal in zip(diagonal_gradients, diagonals, strict=False)
            ]
        return None, None, None, None, weight_gradients, None, *diagonal_gradients, *[None] * len(plan)


def _split(tensors: Sequence[Tensor], num_cores: int, num_diagonals: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    beyond = num_cores + num_diagonals
    return list(tensors[:num_cores]), list(tensors[num_cores:beyond]), list(tensors[beyond:])
