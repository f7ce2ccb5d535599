"""Bags of rows on GPUs, by the kernels that `kernel_calls.py` calls; `reference.pool` defines what they compute.

L ids, T tables, F features of B bags each, N columns. A row is a product of a leading and a trailing slice, formed when bags need
it and never stored; one kernel reads all tables of order 2 in place. The halves of tables of order 3 and 4 are looked up first, as
the rows of tables of order 2: all of them, P + Q for P Q rows, which takes less than finding those that a batch needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.ops.bags.kernel_calls import Ending, KernelCalls, KernelTables
from comera_rec.ops.bags.table import Table, TableGroup
from comera_rec.ops.bags.updates import ROW_WISE, Updates, current_updates, find_updates, refuse_row_wise
from comera_rec.ops.plan.pairs import PairPlan, is_transformed, plan_hot_rows, plan_pairs
from comera_rec.tt import slice_major_together
from data_pipeline.errors import UserError


class Pairs:
    """Neighboring cores of all tables, or blocks of hot rows, as kernels take them, and their updates in backward.

    Args:
        firsts, seconds: T cores (a, m, n, r) and as many (r, m', n', c), where a or c is 1.
        diagonals: T diagonals (r) or (r, 1), or none.
        may_update: whether cores whose optimizers were applied in backward are updated there, where that is possible.
        number: of the first cores among the `order` cores of their tables.
        sources: the tensors that cores are parts of, in the order of their memory, which get the gradients; the cores by default.

    Raises:
        ValueError: for cores of a dtype other than float32, bfloat16 or float16, and row-wise Adagrad in backward whose settings
            differ.
    """

    def __init__(
        self, firsts: Sequence[Tensor], seconds: Sequence[Tensor], diagonals: Sequence[Tensor], may_update: bool, number: int = 0,
        order: int = 2, sources: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        if firsts[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"the cores are {firsts[0].dtype}: the GPU kernels compute in float32; give float64 to impl='reference'"
            )
        cores = [*firsts, *seconds]
        self.cores = slice_major_together(cores, [number] * len(firsts) + [number + 1] * len(seconds), order)
        self.sources = sources or self.cores
        self.diagonals = [diagonal.contiguous() for diagonal in diagonals]
        self.has_copies = not (all(map(is_, self.cores, cores)) and all(map(is_, self.diagonals, diagonals)))
        self.counts = tuple(sum(core.shape[1] for core in side) for side in (firsts, seconds))
        self._updates = find_updates(self.cores, self.diagonals) if may_update else None
        self._tables: KernelTables | None = None

    @property
    def tables(self) -> KernelTables:
        """Addresses and sizes."""
        if self._tables is None:
            self._tables = KernelTables(*([each.detach() for each in tensors] for tensors in (self.cores, self.diagonals)))
        return self._tables

    @property
    def updates(self) -> Updates | None:
        """The updates in backward of the next step, if kernels can apply them."""
        updates = current_updates(self._updates, self.cores, self.diagonals)
        return updates if updates is not None and updates.gpu_rules() is not None else None


class _HalfPlan:
    """The plan of all products of slices of two neighboring cores, of all tables."""

    def __init__(self, tables: Sequence[Table], number: int) -> None:
        modes = [(table.cores[number].shape[1], table.cores[number + 1].shape[1]) for table in tables]
        self.counts, device = [m * n for m, n in modes], tables[0].cores[0].device
        self.pairs = plan_pairs([torch.arange(count, device=device) for count in self.counts], modes, self.counts)
        self.ends = torch.arange(sum(self.counts) + 1, device=device)


class _HalfPlans:
    """The plans of the halves of two cores that tables have."""

    has_copies = False

    def __init__(self, tables: Sequence[Table], may_update: bool) -> None:
        order = len(tables[0].cores)
        self.plans = [_HalfPlan(tables, number) for number in range(0, order - 1, 2)] if order > 2 else []


def _half(tables: Sequence[Table], number: int) -> Pairs:
    firsts, seconds = zip(*(table.cores[number : number + 2] for table in tables), strict=True)
    diagonals = [table.diagonals[number] for table in tables if table.diagonals]
    return Pairs(_padded(firsts, 0), _padded(seconds, 3), diagonals, False, number, len(tables[0].cores))


def _products(pairs: Pairs, plan: _HalfPlan) -> Tensor:
    """Form the products of two neighboring cores: the slice-major cores (a, m m', n n', c) of all tables in one."""
    (a, _, n1, _), (_, _, n2, c) = pairs.cores[0].shape, pairs.cores[-1].shape
    rows = pool_pairs(pairs, plan.pairs, plan.ends, None, ("sum", 1, a * n1 * c * n2))
    return rows.view(sum(plan.counts), a, n1, c, n2).transpose(2, 3).flatten(3).contiguous().permute(1, 0, 3, 2)


def _padded(cores: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """Pad a bond of cores, the first or the last dimension, to that of the largest with zeros, which change no product."""
    size = max(core.shape[dim] for core in cores)
    front = [0] * (7 - 2 * dim)
    return [core if core.shape[dim] == size else F.pad(core, [*front, size - core.shape[dim]]) for core in cores]


class _Layout:
    """The tables, and all of their hot blocks."""

    def __init__(self, tables: Sequence[Table], may_update: bool) -> None:
        cores = [table.cores for table in tables]
        order = len(cores[0])
        self._halves = [_half(tables, number) for number in range(0, order - 1, 2)] if order > 2 else []
        self._lasts = [each[-1] for each in cores] if order > 1 else [cores[0][0].new_ones(1, 1, 1, 1)] * len(tables)
        self._diagonals = [table.diagonals[(order - 1) // 2] for table in tables if table.diagonals]
        self._pairs: Pairs | None = None
        if not self._halves:
            self._pairs = Pairs([each[0] for each in cores], self._lasts, self._diagonals, may_update and order == 2)
        self.hot = _hot_pairs(tables, may_update)
        parts = [self._pairs, self.hot, *self._halves]
        self.has_copies = any(part.has_copies for part in parts if part is not None)

    def pairs(self, plans: Sequence[_HalfPlan]) -> Pairs:
        """The tables as those of order 2; plans of their halves."""
        if self._pairs is not None:
            return self._pairs
        products = list(map(_products, self._halves, plans))
        lasts = slice_major_together(_padded(self._lasts, 0), [1] * len(self._lasts), 2)
        sources = products if len(products) == 2 else [*products, *lasts]
        parts = products if is_transformed() else [each.detach() for each in products]
        lefts, *others = (each.split(plan.counts, dim=1) for each, plan in zip(parts, plans, strict=True))
        diagonals = self._diagonals
        if len({each.shape[0] for each in diagonals}) > 1:  # then the products' ranks are padded
            diagonals = list(nn.utils.rnn.pad_sequence([each.flatten() for each in diagonals], batch_first=True))
        return Pairs(lefts, others[0] if others else lasts, diagonals, may_update=False, sources=sources)


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
    pairs = layout.pairs(group.layout(_HalfPlans, False).plans)
    bags = pool_pairs(pairs, plan, *how)
    if layout.hot is None:
        return bags
    trailing = [core.shape[1] for core in pairs.cores[len(tables) :]]
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
    updates, arrays = pairs.updates, (plan.pairs, plan.slices, plan.order)
    if updates is None and is_transformed():
        traced: Tensor = _pool(pairs.cores, pairs.diagonals, list(arrays), offsets, weights, *settings)[0]
        return traced
    handle = torch.empty(0, device=offsets.device, requires_grad=updates is not None)  # or nothing might need a gradient
    parameters = pairs.diagonals if updates is None or updates.diagonals is None else []
    parameters = [*pairs.sources, *parameters] if updates is None else parameters
    bags: Tensor = _Pool.apply(settings, pairs.tables, updates, handle, *arrays, offsets, weights, *parameters)
    return bags


def _cut(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut flat numbers into tensors of the shapes and layouts of others."""
    parts = numbers.split([each.numel() for each in tensors])
    return [part.as_strided(each.shape, each.stride(), part.storage_offset()) for part, each in zip(parts, tensors, strict=True)]


def _zeros_for(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return flat zeros for the gradients of tensors."""
    return like.new_zeros(sum(each.numel() for each in tensors))


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
    core_gradients, diagonal_gradients = _zeros_for(cores, cores[0]), _zeros_for(diagonals, cores[0])
    if not (grad.numel() and call.num_ids):
        return core_gradients, diagonal_gradients, grad.new_zeros(call.num_ids if of_weights else 0)
    of_diagonals = Ending("gradient", _cut(diagonal_gradients, diagonals)) if diagonals else None
    call.finish(call.sum_slices(grad, targets), Ending("gradient", _cut(core_gradients, cores)), of_diagonals)
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
    weight_gradients = weight_gradients if of_weights else None
    return _cut(core_gradients, cores), _cut(diagonal_gradients, diagonals), [None] * 3, None, weight_gradients, None, None, None


torch.library.register_autograd(_pool, _differentiate, setup_context=_setup_context)


class _Pool(torch.autograd.Function):
    """Bags whose backward forms the gradients of cores, or applies their optimizers to the slices that the batch used.

    A registered operator, which tracers and transforms need, takes longer to call than its kernels run.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: Any, tables: KernelTables, updates: Updates | None, handle: Tensor, pairs: Tensor, slices: Tensor,
        order: Tensor, offsets: Tensor, weights: Tensor | None, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        out, targets = KernelCalls(tables, (pairs, slices, order), offsets, weights, *settings).forward()
        ctx.settings, ctx.tables, ctx.updates = settings, tables, updates
        ctx.save_for_backward(pairs, slices, order, offsets, weights, targets, *parameters)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *plan, offsets, weights, targets = ctx.saved_tensors[:6]
        tables, updates, parameters = ctx.tables, ctx.updates, ctx.saved_tensors[6:]
        call, grad = KernelCalls(tables, plan, offsets, weights, *ctx.settings), grad.contiguous()
        if updates is not None:
            updates.require_possible()
            rules, kind, (of_cores, of_diagonals) = updates.gpu_rules(), updates.kind, updates.begin_gpu_step()
        if not (grad.numel() and call.num_ids):
            return *(None,) * 8, None if weights is None else torch.zeros_like(weights), *map(torch.zeros_like, parameters)
        results = gradients = []
        if parameters:
            flat = _zeros_for(parameters, tables.leading)
            results = gradients = _cut(flat, parameters)
            if updates is None and len(parameters) != len(tables.cores) + len(tables.diagonals):
                results = _cut(flat, [*tables.cores, *tables.diagonals])
        num_cores = len(tables.cores) if updates is None else 0
        cores_end, diagonals_end = Ending("gradient", results[:num_cores]), Ending("gradient", results[num_cores:])
        if updates is not None:
            cores_end = Ending(kind.name, of_cores, rules[0])
            if updates.diagonals is not None:  # a row of a diagonal is one number
                diagonals_end = Ending("Adagrad" if kind is ROW_WISE else kind.name, of_diagonals, rules[1])
        sums, of_weights = call.sum_slices(grad, targets), weights is not None and ctx.needs_input_grad[8]
        weight_gradients = call.gradients_of_weights(grad, targets) if of_weights else None
        call.finish(sums, cores_end, diagonals_end if diagonals_end.results else None)
        if updates is not None:
            updates.end_step()
        return *(None,) * 8, weight_gradients, *gradients
