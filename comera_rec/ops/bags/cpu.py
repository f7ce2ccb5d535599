"""Bags of rows on CPU, by the operators of `csrc`, which add rows to bags and gradients to slices straight from registers.

T tables of d cores, L ids, F features of B bags each, N columns.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from comera_rec.ops.bags.table import Table, TableGroup
from comera_rec.ops.bags.updates import Updates, current_updates, find_updates
from comera_rec.ops.derivatives import once_differentiable
from comera_rec.ops.native import ops
from comera_rec.ops.plan import LookupPlan
from comera_rec.tt import slice_major

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAN = len(LookupPlan._fields)


class Slots(NamedTuple):
    """Where in wider bags, [B, per_sample * N], a lookup writes those of its features: bags of other lookups lie between them."""

    of_features: Sequence[int]
    """[F], in bags."""
    per_sample: int
    bags: Tensor | None
    """What the lookups of other features have returned; None for the first one, which makes them."""


class _Layout:
    """The parameters of tables as the operators take them, and their updates in backward."""

    def __init__(self, tables: Sequence[Table], may_update: bool) -> None:
        order = len(tables[0].cores)
        given = [core for table in tables for core in table.cores]
        # Table by table, then A and P of each hot block; diagonals likewise, or none if all of them are ones.
        self.cores = [slice_major(core, k, order) for table in tables for k, core in enumerate(table.cores)]
        diagonals = [diagonal for table in tables for diagonal in table.diagonals]
        self.diagonals = [diagonal.contiguous() for diagonal in diagonals]
        has_blocks = any(table.hot for table in tables)
        self.blocks = [len(table.hot) for table in tables] if has_blocks else []
        self.first_rows = [table.first for table in tables] if has_blocks else []
        if has_blocks and not diagonals:
            diagonals = [core.new_ones(core.shape[3]) for table in tables for core in table.cores[:-1]]
            self.diagonals = list(diagonals)
        for block in (block for table in tables for block in table.hot):
            # A contiguous core of a block is slice-major, because its other sizes are 1; this check is the cheapest.
            self.cores += [core if core.is_contiguous() else slice_major(core, k, 2) for k, core in enumerate(block[:2])]
            self.diagonals.append(block.diagonal.contiguous())
            given += block[:2]
            diagonals.append(block.diagonal)
        self.has_copies = not (all(map(is_, self.cores, given)) and all(map(is_, self.diagonals, diagonals)))
        # Cores that had to be copied into another layout have no optimizer.
        self._updates = find_updates(self.cores, self.diagonals) if may_update else None

    @property
    def updates(self) -> Updates | None:
        """The updates in backward of the next step, if its parameters have any."""
        return current_updates(self._updates, self.cores, self.diagonals)


def pool(
    group: TableGroup,
    plan: LookupPlan,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    mode: str,
    features: int,
    num_cols: int,
    update: bool = True,
    slots: Slots | None = None,
) -> Tensor:
    """Pool rows to [B, F * num_cols] float32, or into `slots`; arguments as for `tt_bags`, weights in float32."""
    layout: _Layout = group.layout(_Layout, update and torch.is_grad_enabled() and not torch.compiler.is_compiling())
    cores, diagonals, updates = layout.cores, layout.diagonals, layout.updates
    of_features, count = (range(features), features) if slots is None else slots[:2]
    settings = (mode == "mean", list(of_features), count, num_cols, layout.blocks, layout.first_rows)
    if updates is None and slots is None:
        bags: Tensor = ops.pool(cores, diagonals, list(plan), offsets, weights, *settings)
        return bags
    handle = None
    if updates is not None:  # what is updated gets no gradient
        cores, diagonals = [], diagonals if updates.diagonals is None else []
        # Needs a gradient, so that autograd calls a backward whose other inputs need none.
        handle = torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)
    into = None if slots is None else slots.bags
    bags = _Pool.apply(settings, updates, handle, into, offsets, weights, len(cores), len(diagonals), *cores, *diagonals, *plan)
    return bags


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    ctx.counts = len(cores), len(diagonals)
    ctx.save_for_backward(offsets, weights, *cores, *diagonals, *plan)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    num_cores, num_diagonals = ctx.counts
    cores, diagonals, (weights,) = _split(_gradients(ctx, grad), num_cores, num_diagonals)
    lists: list[None] | None = None if ctx.settings[-1] else []  # torch mistakes an empty list of numbers for one of tensors
    return cores, diagonals, [None] * _PLAN, None, weights, None, None, None, None, lists, lists


@once_differentiable
def _gradients(ctx: Any, grad: Tensor, offsets: Tensor, weights: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """Return the gradients of cores, then of diagonals, then of weights."""
    cores, diagonals, plan = _split(tensors, *ctx.counts)
    core_gradients, diagonal_gradients, weight_gradients = ops.pool_backward(
        grad.float().contiguous(), cores, diagonals, plan, offsets, weights, *ctx.settings
    )
    return *core_gradients, *_like(diagonals, diagonal_gradients), None if weights is None else weight_gradients


@_disable_dynamo  # or compiled autograd would trace it
@once_differentiable
def _update(ctx: Any, grad: Tensor, offsets: Tensor, weights: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """Apply the optimizers of cores; return the gradients of diagonals without one, then of weights."""
    updates, (_, diagonals, plan) = ctx.updates, _split(tensors, *ctx.counts)
    parameters = updates.cores, updates.diagonals or diagonals
    diagonal_gradients, weight_gradients = ops.pool_backward_update(
        grad.float().contiguous(), *parameters, plan, offsets, weights, *ctx.settings, *updates.begin_step()
    )
    updates.end_step()
    return *_like(diagonals, diagonal_gradients), None if weights is None else weight_gradients


torch.library.register_autograd("comera_rec::pool", _differentiate, setup_context=_setup_context)


class _Pool(torch.autograd.Function):
    """Bags written into others, or whose backward applies the optimizers of cores to the slices that the batch used.

    The gradient of bags that were written into is passed on as it is: lookups read the slots of their own features only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: Any,
        updates: Updates | None,
        handle: Tensor | None,
        into: Tensor | None,
        offsets: Tensor,
        weights: Tensor | None,
        num_cores: int,
        num_diagonals: int,
        *tensors: Tensor,
    ) -> Tensor:
        cores, diagonals, plan = _split(tensors, num_cores, num_diagonals)
        if updates is not None:
            cores, diagonals = updates.cores, updates.diagonals or diagonals
        arguments = (cores, diagonals, plan, offsets, weights, *settings)
        ctx.settings, ctx.updates, ctx.counts = settings, updates, (num_cores, num_diagonals)
        ctx.save_for_backward(offsets, weights, *tensors)
        if into is None:
            bags: Tensor = ops.pool(*arguments)
            return bags
        ops.pool_into(into, *arguments)
        ctx.mark_dirty(into)
        return into

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, weight_gradients = (_gradients if ctx.updates is None else _update)(ctx, grad)
        return (
            None,
            None,
            None,
            grad if ctx.needs_input_grad[3] else None,
            None,
            weight_gradients,
            None,
            None,
            *gradients,
            *[None] * _PLAN,
        )


def write_slots(bags: Tensor, others: Tensor, slots: Sequence[int]) -> Tensor:
    """Write other bags, [B, F * N], into slots [F] of what lookups have returned, [B, per_sample * N]; see `Slots`."""
    written: Tensor = _WriteSlots.apply(bags, others.float().contiguous(), slots)
    return written


class _WriteSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bags: Tensor, others: Tensor, slots: Sequence[int]) -> Tensor:
        ctx.slots, ctx.width = slots, others.shape[1] // len(slots)
        ops.write_slots(bags, others, slots)
        ctx.mark_dirty(bags)
        return bags

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ops.read_slots(grad.contiguous(), ctx.slots, ctx.width), None


def _split(tensors: Sequence[Tensor], num_cores: int, num_diagonals: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    beyond = num_cores + num_diagonals
    return list(tensors[:num_cores]), list(tensors[num_cores:beyond]), list(tensors[beyond:])


def _like(diagonals: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [gradient.to(diagonal.dtype).view_as(diagonal) for gradient, diagonal in zip(gradients, diagonals, strict=False)]
