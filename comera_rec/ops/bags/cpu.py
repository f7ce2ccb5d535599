"""Bags of rows on CPU, by the operators of `csrc`: rows go from registers to their bags, gradients from bags to slices.

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
    """[B, F * num_cols] float32: sums or means, differentiable in cores, diagonals and weights.

    Args:
        cores: T * d, table by table, slice after slice (`slice_major`); then A and P of each hot block.
        diagonals: T * (d - 1), or none of these for ones; then D of each hot block.
        plan, offsets, features, num_cols: as for `tt_bags`.
        weights: [L] float32, for sums.
        hot: per table how many hot blocks it has, and which of its rows id 0 is; empty where none has any.
        updates: changes the cores in backward, in place of returning their gradients.
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
    """What makes autograd call a backward that has no tensor to differentiate by."""
    return torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    ctx.counts = len(cores), len(diagonals)
    ctx.save_for_backward(offsets, weights, *cores, *diagonals, *plan)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    num_cores, num_diagonals = ctx.counts
    of_cores, of_diagonals, (of_weights,) = _split(_gradients(ctx, grad), num_cores, num_diagonals)
    of_hot: list[None] | None = None if ctx.settings[-1] else []  # torch takes an empty list for one of tensors
    return of_cores, of_diagonals, [None] * _PLAN, None, of_weights, None, None, None, of_hot


@torch.autograd.function.once_differentiable
def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients_of(ctx.settings, *ctx.counts, grad, *ctx.saved_tensors)


def _gradients_of(
    settings: Any, num_cores: int, num_diagonals: int, grad: Tensor, offsets: Tensor, weights: Tensor | None, *tensors: Tensor
) -> tuple[Any, ...]:
    """Of cores, diagonals and weights, end to end."""
    cores, diagonals, plan = _split(tensors, num_cores, num_diagonals)
    of_cores, of_diagonals, of_weights = ops.pool_backward(
        grad.float().contiguous(), cores, diagonals, plan, offsets, weights, *settings
    )
    of_diagonals = [gradient.to(diagonal.dtype) for gradient, diagonal in zip(of_diagonals, diagonals, strict=False)]
    return *of_cores, *of_diagonals, None if weights is None else of_weights


torch.library.register_autograd("comera_rec::pool", _differentiate, setup_context=_setup_context)


def _pool_in_transforms(
    cores: list[Tensor], diagonals: list[Tensor], plan: list[Tensor], offsets: Tensor, weights: Tensor | None, *settings: Any
) -> Tensor:
    bags: Tensor = _Pool.apply(settings, len(cores), len(diagonals), offsets, weights, *cores, *diagonals, *plan)
    return bags


class _Pool(torch.autograd.Function):
    """The same for torch.func, which doesn't know the gradients that torch.library registers."""

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
        *gradients, of_weights = _Gradients.apply(ctx.settings, *ctx.counts, grad, *ctx.saved_tensors)
        return None, None, None, None, of_weights, *gradients, *[None] * _PLAN


class _Gradients(torch.autograd.Function):
    """Gradients under torch.func, where `once_differentiable` has no effect: a second derivative would silently be zero."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, ...]:
        return _gradients_of(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("bags of tensor-train tables have no second derivative; use impl='reference' to differentiate twice")


class _UpdatingPool(torch.autograd.Function):
    """Backward applies the optimizers of cores to the slices that the batch met."""

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
        of_diagonals, of_weights = ops.pool_backward_update(
            grad.float().contiguous(), updates.cores, diagonals, plan, offsets, weights, *ctx.settings, *updates.begin_step()
        )
        of_weights = None if weights is None else of_weights
        if updates.diagonals is not None:
            of_diagonals = [None] * len(diagonals)
        else:
            of_diagonals = [gradient.to(diagonal.dtype) for gradient, diagonal in zip(of_diagonals, diagonals, strict=False)]
        return None, None, None, None, of_weights, None, *of_diagonals, *[None] * len(plan)


def _split(tensors: Sequence[Tensor], num_cores: int, num_diagonals: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    beyond = num_cores + num_diagonals
    return list(tensors[:num_cores]), list(tensors[num_cores:beyond]), list(tensors[beyond:])
