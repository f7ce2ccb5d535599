"""Bags of rows on GPUs, by the kernels that `kernel_calls.py` calls; `reference.pool` defines what they compute.

L ids, T tables, F features of B bags each, N columns. A row is a product of a leading and a trailing slice, formed when bags need
it and never stored. One kernel reads all tables of order 2 in place; of tables of order 3 and 4, torch first forms all products of
the slices of each half, P + Q of a table of P Q rows, which takes less than finding those that a batch needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.autocast import without_autocast
from comera_rec.ops.bags.kernel_calls import Ending, KernelCalls, KernelTables
from comera_rec.ops.bags.table import Table, TableGroup
from comera_rec.ops.bags.updates import ROW_WISE, Updates, current_updates, find_updates, refuse_row_wise
from comera_rec.ops.plan.pairs import PairPlan, plan_hot_rows
from comera_rec.tt import slice_major_together
from data_pipeline.errors import UserError


class Pairs:
    """Tables of order 2, or blocks of hot rows, as kernels take them, and their updates in backward.

    Args:
        lefts, rights: T cores (1, m, n1, r) and as many (r, m, n2, 1).
        diagonals: T diagonals (r) or (r, 1), or none.
        may_update: whether cores whose optimizers were applied in backward are updated there, where that is possible.

    Raises:
        ValueError: for cores of a dtype other than float32, bfloat16 or float16, and row-wise Adagrad in backward whose settings
            differ.
    """

    def __init__(self, lefts: Sequence[Tensor], rights: Sequence[Tensor], diagonals: Sequence[Tensor], may_update: bool) -> None:
        if lefts[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"the cores are {lefts[0].dtype}: the GPU kernels compute in float32; give float64 to impl='reference'")
        cores = [*lefts, *rights]
        self.cores = slice_major_together(cores, [0] * len(lefts) + [1] * len(rights), 2)
        self.diagonals = [diagonal.contiguous() for diagonal in diagonals]
        self.has_copies = not (all(map(is_, self.cores, cores)) and all(map(is_, self.diagonals, diagonals)))
        self.counts = tuple(sum(core.shape[1] for core in side) for side in (lefts, rights))
        self._updates = find_updates(self.cores, self.diagonals) if may_update else None
        self._tables: KernelTables | None = None

    @property
    def tables(self) -> KernelTables:
        """Addresses and sizes."""
        if self._tables is None:
            # Detached, they keep their memory until backward even if the parameters are given other data.
            self._tables = KernelTables(*([each.detach() for each in tensors] for tensors in (self.cores, self.diagonals)))
        return self._tables

    @property
    def updates(self) -> Updates | None:
        """The updates in backward of the next step, if kernels can apply them."""
        updates = current_updates(self._updates, self.cores, self.diagonals)
        return updates if updates is not None and updates.gpu_rules() is not None else None


class _Layout:
    """The tables, and all of their hot blocks."""

    def __init__(self, tables: Sequence[Table], may_update: bool) -> None:
        with without_autocast(tables[0].cores[0].device):
            lefts, rights, diagonals = zip(*map(_halves, tables), strict=True)
        self.pairs = Pairs(lefts, rights, [diagonal for of_table in diagonals for diagonal in of_table], may_update)
        self.hot = _hot_pairs(tables, may_update)
        has_copies = self.pairs.has_copies or (self.hot is not None and self.hot.has_copies)
        self.has_copies = has_copies or len(tables[0].cores) != 2


def _halves(table: Table) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return a table as one of order 2: cores (1, P, n1, r) and (r, Q, n2, 1), and the diagonal between them, if any."""
    cores, diagonals, cut = table.cores, table.diagonals, (len(table.cores) + 1) // 2
    left = _product(cores[:cut], diagonals[: cut - 1])
    right = _product(cores[cut:], diagonals[cut:]) if len(cores) > 1 else left.new_ones(1, 1, 1, 1)
    return left, right, diagonals[cut - 1 : cut]


def _product(cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> Tensor:
    """Return the slice-major core of all products of slices of two cores, in float32; a single core as it is."""
    if len(cores) == 1:
        return cores[0]
    first, second = (core.float() for core in cores)
    for diagonal in diagonals:
        first = first * diagonal.flatten()
    product = torch.einsum("aimb,bjnc->ijacmn", first, second)  # of (a, i, m, b), a or c is 1
    return product.flatten(4).flatten(0, 1).permute(1, 0, 3, 2)


def _hot_pairs(tables: Sequence[Table], may_update: bool) -> Pairs | None:
    blocks = [block for table in tables for block in table.hot]
    if not blocks:
        return None
    rows, projections, diagonals = zip(*blocks, strict=True)
    return Pairs(rows, projections, diagonals, may_update)


def pool(
    group: TableGroup,
    plan: PairPlan,
    offsets: Tensor,
    weights: Tensor | None,
    *,
    mode: str,
    features: int,
    num_cols: int,
    update: bool = True,
) -> Tensor:
    """Pool rows to [B, F * num_cols]; arguments as for `tt_bags`."""
    how = (offsets, weights, (mode, features, num_cols))
    tables, may_update = group.tables, update and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if update and len(tables[0].cores) != 2:
        refuse_row_wise(tables, "on a GPU it needs tables of order 2: use Adagrad, or order=2")
    layout: _Layout = group.layout(_Layout, may_update)
    bags = pool_pairs(layout.pairs, plan, *how)
    if layout.hot is None:
        return bags
    trailing = [core.shape[1] for core in layout.pairs.cores[len(tables) :]]
    counts = [[block.rows.shape[1] for block in table.hot] for table in tables]
    hot_plan = plan_hot_rows(plan.pairs, trailing, [table.first for table in tables], counts)
    return bags + pool_pairs(layout.hot, hot_plan, *how)


def pool_pairs(pairs: Pairs, plan: PairPlan, offsets: Tensor, weights: Tensor | None, settings: tuple[str, int, int]) -> Tensor:
    """Pool products of pairs of slices: [B, F * N], differentiable in cores, diagonals and weights.

    Args:
        settings: mode, F and N.

    Raises:
        ValueError: for a plan for other tables.
    """
    if pairs.counts != tuple(plan.counts):
        raise UserError(f"the plan is for tables of {plan.counts} slices, these have {pairs.counts}: make it for these tables")
    updates = pairs.updates
    if updates is not None:
        handle = torch.empty(0, dtype=torch.float32, device=pairs.cores[0].device, requires_grad=True)
        diagonals = pairs.diagonals if updates.diagonals is None else []
        tensors = (plan.pairs, plan.slices, plan.order, offsets, weights, *diagonals)
        bags: Tensor = _UpdatingPool.apply(settings, pairs.tables, updates, handle, *tensors)
    else:
        bags, _ = _pool(pairs.cores, pairs.diagonals, [plan.pairs, plan.slices, plan.order], offsets, weights, *settings)
    return bags


def _like(diagonals: Sequence[Tensor], gradients: Tensor) -> list[Tensor]:
    """Cut the concatenated gradients of diagonals into tensors of their shapes."""
    parts = gradients.split([len(diagonal) for diagonal in diagonals]) if diagonals else ()
    return [part.view_as(diagonal) for part, diagonal in zip(parts, diagonals, strict=True)]


def pool_into_bags(
    cores: Sequence[Tensor], diagonals: Sequence[Tensor], plan: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
    mode: str, features: int, num_cols: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of `KernelCalls.forward`; cores are slice-major."""
    return KernelCalls(KernelTables(cores, diagonals), plan, offsets, weights, mode, features, num_cols).forward()


_pool = torch.library.custom_op("comera_rec::pool_pairs", pool_into_bags, mutates_args=(), schema=(
    "(Tensor[] cores, Tensor[] diagonals, Tensor[] plan, Tensor offsets, Tensor? weights, str mode, int features, "
    "int num_cols) -> (Tensor, Tensor)"
))  # fmt: skip


@_pool.register_fake
def _(cores, diagonals, plan, offsets, weights, mode, features, num_cols):  # type: ignore[no-untyped-def]
    num_bags = offsets.shape[0] - 1
    out = cores[0].new_empty(num_bags // features, features * num_cols)
    return out, out.new_empty(plan[0].shape[1], dtype=torch.int32)


def gradients(
    grad: Tensor, targets: Tensor, cores: Sequence[Tensor], diagonals: Sequence[Tensor], plan: Sequence[Tensor],
    offsets: Tensor, weights: Tensor | None, mode: str, features: int, num_cols: int, of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return flat gradients: of the cores (slice-major, concatenated), of the diagonals (concatenated), of the weights or none."""
    call = KernelCalls(KernelTables(cores, diagonals), plan, offsets, weights, mode, features, num_cols)
    core_gradients = cores[0].new_zeros(sum(core.numel() for core in cores))
    diagonal_gradients = cores[0].new_zeros(sum(len(diagonal) for diagonal in diagonals))
    if not (grad.numel() and call.num_ids):
        return core_gradients, diagonal_gradients, grad.new_zeros(call.num_ids if of_weights else 0)
    cores_end = Ending("gradient", core_gradients.split([core.numel() for core in cores]))
    diagonals_end = Ending("gradient", diagonal_gradients.split([len(each) for each in diagonals])) if diagonals else None
    call.finish(call.sum_slices(grad, targets), cores_end, diagonals_end)
    weight_gradients = call.gradients_of_weights(grad, targets) if of_weights else grad.new_empty(0)
    return core_gradients, diagonal_gradients, weight_gradients


_gradients = torch.library.custom_op("comera_rec::pool_pairs_backward", gradients, mutates_args=(), schema=(
    "(Tensor grad, Tensor targets, Tensor[] cores, Tensor[] diagonals, Tensor[] plan, Tensor offsets, "
    "Tensor? weights, str mode, int features, int num_cols, bool of_weights) -> (Tensor, Tensor, Tensor)"
))  # fmt: skip


@_gradients.register_fake
def _(grad, targets, cores, diagonals, plan, offsets, weights, mode, features, num_cols, of_weights):  # type: ignore[no-untyped-def]
    sizes = (sum(each.numel() for each in tensors) for tensors in (cores, diagonals))
    return *(cores[0].new_empty(size) for size in sizes), grad.new_empty(weights.shape[0] if of_weights else 0)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    _, targets = output
    ctx.mark_non_differentiable(targets)
    ctx.lengths = len(cores), len(diagonals)
    ctx.save_for_backward(offsets, weights, targets, *plan, *cores, *diagonals)


def _differentiate(ctx, grad: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    offsets, weights, targets, *tensors = ctx.saved_tensors
    plan, num_cores = tensors[:3], ctx.lengths[0]
    cores, diagonals = tensors[3 : 3 + num_cores], tensors[3 + num_cores :]
    of_weights = weights is not None and ctx.needs_input_grad[4]
    arguments = (cores, diagonals, plan, offsets, weights, *ctx.settings, of_weights)
    core_gradients, diagonal_gradients, weight_gradients = _gradients(grad.contiguous(), targets, *arguments)
    split = core_gradients.split([core.numel() for core in cores])
    shaped = [part.as_strided(core.shape, core.stride(), part.storage_offset()) for part, core in zip(split, cores, strict=True)]
    split_diagonals = _like(diagonals, diagonal_gradients)
    return shaped, split_diagonals, [None] * 3, None, weight_gradients if of_weights else None, None, None, None


torch.library.register_autograd(_pool, _differentiate, setup_context=_setup_context)


class _UpdatingPool(torch.autograd.Function):
    """Bags whose backward applies the optimizers of cores to the slices that the batch used."""

    @staticmethod
    def forward(
        ctx: Any, settings: Any, tables: KernelTables, updates: Updates, handle: Tensor, pairs: Tensor, slices: Tensor,
        order: Tensor, offsets: Tensor, weights: Tensor | None, *diagonals: Tensor,
    ) -> Tensor:  # fmt: skip
        out, targets = KernelCalls(tables, (pairs, slices, order), offsets, weights, *settings).forward()
        ctx.settings, ctx.tables, ctx.updates = settings, tables, updates
        ctx.save_for_backward(pairs, slices, order, offsets, weights, targets, *diagonals)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *plan, offsets, weights, targets = ctx.saved_tensors[:6]
        saved, updates = list(ctx.saved_tensors[6:]), ctx.updates
        call, grad = KernelCalls(ctx.tables, plan, offsets, weights, *ctx.settings), grad.contiguous()
        updates.require_possible()
        rules = updates.gpu_rules()
        kind, (of_cores, of_diagonals) = updates.kind, updates.begin_gpu_step()
        weight_gradients: Tensor | None = None
        diagonal_gradients: list[Tensor] = []
        if not (grad.numel() and call.num_ids):
            return *(None,) * 8, None if weights is None else torch.zeros_like(weights), *map(torch.zeros_like, saved)
        sums = call.sum_slices(grad, targets)
        if weights is not None and ctx.needs_input_grad[8]:
            weight_gradients = call.gradients_of_weights(grad, targets)
        diagonals_end = None
        if updates.diagonals is not None:
            of_numbers = "Adagrad" if kind is ROW_WISE else kind.name  # a row of a diagonal is one number
            diagonals_end = Ending(of_numbers, of_diagonals, rules[1])
        elif saved:
            flat = grad.new_zeros(sum(map(len, saved)), dtype=saved[0].dtype)
            diagonals_end = Ending("gradient", flat.split([len(each) for each in saved]))
            diagonal_gradients = _like(saved, flat)
        call.finish(sums, Ending(kind.name, of_cores, rules[0]), diagonals_end)
        updates.end_step()
        return *(None,) * 8, weight_gradients, *diagonal_gradients
