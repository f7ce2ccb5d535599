"""Bags of rows on GPUs, by the kernels that `kernel_calls.py` calls; `reference.pool` defines what they compute.

L ids, T tables, F features of B bags each, N columns. A row is a product of a leading and a trailing slice, formed when bags need
it and never stored; one kernel reads all tables of order 2 in place. The halves of tables of order 3 and 4 are looked up first, as
the rows of tables of order 2: all of them, P + Q for P Q rows, which takes less than finding those that a batch needs.
"""

import math
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from comera_rec.ops.bags.kernel_calls import Ending, KernelCalls, KernelTables
from comera_rec.ops.bags.table import Table, TableGroup
from comera_rec.ops.bags.updates import ROW_WISE, Updates, current_updates, find_updates, refuse_row_wise
from comera_rec.ops.derivatives import once_differentiable
from comera_rec.ops.plan.pairs import UNSAFE, PairPlan, is_transformed, plan_all_rows, plan_hot_rows
from comera_rec.tt import is_slice_major, slice_major, slice_major_stride
from data_pipeline.errors import UserError

Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides."""


class Side(NamedTuple):
    """One of two neighboring cores, of all tables, as kernels take them: slice-major, their bonds to others equally large."""

    cores: Sequence[Tensor]
    sources: Sequence[Tensor]
    """What autograd differentiates: the same, or the tensors whose memory the cores share, one behind the other."""


def _side(cores: Sequence[Tensor], number: int, order: int, dim: int) -> Side:
    """Lay out the cores of a number among `order`; `dim` is the bond to other cores, 0 or 3. Copies have one memory."""
    size = max(core.shape[dim] for core in cores)
    if all(core.shape[dim] == size and is_slice_major(core, number, order) for core in cores):
        return Side(cores, cores)
    if is_transformed():
        copies = [F.pad(core, [0] * (7 - 2 * dim) + [size - core.shape[dim]]) for core in cores]
        return Side(*[[slice_major(copy, number, order) for copy in copies]] * 2)
    shapes = [(*core.shape[:dim], size, *core.shape[dim + 1 :]) for core in cores]
    layouts = [(shape, slice_major_stride(shape, number, order)) for shape in shapes]
    joined = _Joined.apply(layouts, *cores)
    return Side(_cut(joined.detach(), layouts), [joined])


class _Joined(torch.autograd.Function):
    """Copies of cores in one memory, flat, with bonds padded by zeros, which change no product."""

    @staticmethod
    def forward(ctx: Any, layouts: Sequence[Layout], *cores: Tensor) -> Tensor:
        ctx.layouts, ctx.shapes = layouts, [core.shape for core in cores]
        flat = cores[0].new_zeros(sum(math.prod(shape) for shape, _ in layouts))
        parts = _cut(flat, layouts)
        torch._foreach_copy_([part[:a, :, :, :c] for part, (a, _, _, c) in zip(parts, ctx.shapes, strict=True)], list(cores))
        return flat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = _cut(grad.contiguous(), ctx.layouts)
        return None, *(part[:a, :, :, :c] for part, (a, _, _, c) in zip(parts, ctx.shapes, strict=True))


class Pairs:
    """Neighboring cores of all tables, or blocks of hot rows, and their updates in backward.

    Args:
        first, second: T cores (a, m, n, r) and as many (r, m', n', c), where a or c is 1.
        diagonals: T diagonals (r) or (r, 1), or none.
        may_update: whether cores whose optimizers were applied in backward are updated there, where that is possible.

    Raises:
        ValueError: for row-wise Adagrad in backward whose settings differ.
    """

    def __init__(self, first: Side, second: Side, diagonals: Sequence[Tensor], may_update: bool) -> None:
        self.cores, self.sources = [*first.cores, *second.cores], [*first.sources, *second.sources]
        self.diagonals = [diagonal.contiguous() for diagonal in diagonals]
        is_whole = all(map(is_, self.sources, self.cores)) and all(map(is_, self.diagonals, diagonals))
        self.has_copies = is_transformed() or not is_whole
        self.counts = tuple(sum(core.shape[1] for core in side.cores) for side in (first, second))
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


def _half(tables: Sequence[Table], number: int) -> Pairs:
    """Return two neighboring cores, whose products are slices of tables of order 2."""
    order, (firsts, seconds) = len(tables[0].cores), zip(*(table.cores[number : number + 2] for table in tables), strict=True)
    diagonals = [table.diagonals[number] for table in tables if table.diagonals]
    return Pairs(_side(firsts, number, order, 0), _side(seconds, number + 1, order, 3), diagonals, may_update=False)


def _products(pairs: Pairs) -> Side:
    """Form all products of slices of two neighboring cores: T cores (a, m m', n n', c)."""
    half, ((a, _, n1, _), (_, _, n2, c)) = len(pairs.cores) // 2, (pairs.cores[0].shape, pairs.cores[-1].shape)
    modes = tuple((one.shape[1], other.shape[1]) for one, other in zip(pairs.cores[:half], pairs.cores[half:], strict=True))
    plan, ends = plan_all_rows(modes, pairs.cores[0].device)
    rows = pool_pairs(pairs, plan, ends, None, ("sum", 1, a * n1 * c * n2))
    whole = rows.view(plan.num_ids, a, n1, c, n2).transpose(2, 3).flatten(3).contiguous().permute(1, 0, 3, 2)
    return Side((whole if is_transformed() else whole.detach()).split([m * n for m, n in modes], dim=1), [whole])


class _Layout:
    """The tables, and all of their hot blocks."""

    def __init__(self, tables: Sequence[Table], may_update: bool) -> None:
        cores = [table.cores for table in tables]
        order = len(cores[0])
        self._halves = [_half(tables, number) for number in range(0, order - 1, 2)] if order > 2 else []
        self._lasts = [each[-1] for each in cores]
        if order == 1:
            with torch.inference_mode(False):  # or training couldn't use what an evaluation made
                self._lasts = [cores[0][0].new_ones(1, 1, 1, 1)] * len(tables)
        self._diagonals = [table.diagonals[(order - 1) // 2] for table in tables if table.diagonals]
        self._pairs: Pairs | None = None
        if not self._halves:
            first, last = _side([each[0] for each in cores], 0, order, 0), _side(self._lasts, 1, 2, 3)
            self._pairs = Pairs(first, last, self._diagonals, may_update and order == 2)
        self.hot = _hot_pairs(tables, may_update)
        parts = [self._pairs, self.hot, *self._halves]
        self.has_copies = any(part.has_copies for part in parts if part is not None)

    def pairs(self) -> Pairs:
        """The tables as those of order 2."""
        if self._pairs is not None:
            return self._pairs
        first, *others = map(_products, self._halves)
        last = others[0] if others else _side(self._lasts, 2, 3, 0)
        return Pairs(first, last, _padded(self._diagonals), may_update=False)


def _padded(diagonals: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pad diagonals to the length of the longest, as the ranks of products are."""
    if len({diagonal.shape[0] for diagonal in diagonals}) < 2:
        return diagonals
    return list(nn.utils.rnn.pad_sequence([diagonal.flatten() for diagonal in diagonals], batch_first=True))


def _hot_pairs(tables: Sequence[Table], may_update: bool) -> Pairs | None:
    blocks = [block for table in tables for block in table.hot]
    if not blocks:
        return None
    rows, projections, diagonals = zip(*blocks, strict=True)
    return Pairs(_side(rows, 0, 2, 0), _side(projections, 1, 2, 3), diagonals, may_update)


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
    pairs = layout.pairs()
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


def _layouts(tensors: Sequence[Tensor]) -> list[Layout]:
    return [(each.shape, each.stride()) for each in tensors]


def _cut(numbers: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """Cut flat numbers into tensors of these shapes and strides."""
    parts = numbers.split([math.prod(shape) for shape, _ in layouts])
    return [part.as_strided(*layout, part.storage_offset()) for part, layout in zip(parts, layouts, strict=True)]


def pool_into_bags(
    cores: Sequence[Tensor], diagonals: Sequence[Tensor], plan: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
    mode: str, features: int, num_cols: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of `KernelCalls.forward`; cores are slice-major."""
    return KernelCalls(KernelTables(cores, diagonals), plan, offsets, weights, mode, features, num_cols).forward()


_pool = torch.library.custom_op("comera_rec::pool_pairs", pool_into_bags, mutates_args=(), tags=UNSAFE, schema=(
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
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the flat gradients of the cores (slice-major) and then the diagonals, and those of the weights or none."""
    call = KernelCalls(KernelTables(cores, diagonals), plan, offsets, weights, mode, features, num_cols)
    flat, weight_gradients = end_step(call, grad, targets, of_weights, call.tables.sizes)
    return flat, grad.new_empty(0) if weight_gradients is None else weight_gradients


def end_step(
    call: KernelCalls, grad: Tensor, targets: Tensor, of_weights: bool, sizes: Sequence[int], updates: Updates | None = None
) -> tuple[Tensor, Tensor | None]:
    """Form gradients of parameters, or apply their optimizers, which may leave those of diagonals to others.

    Args:
        sizes: numbers of each parameter that gets a gradient: cores, unless there are updates, and diagonals.

    Returns:
        Flat gradients, and those of the weights.
    """
    flat = call.tables.leading.new_zeros(sum(sizes)) if sizes else call.tables.leading.new_empty(0)
    parts, num_cores = flat.split(list(sizes)), 2 * len(call.tables.ranks) if updates is None else 0
    cores, diagonals = Ending("gradient", parts[:num_cores]), Ending("gradient", parts[num_cores:])
    if updates is not None:
        updates.require_possible()
        rules, (of_cores, of_diagonals) = updates.gpu_rules(), updates.begin_gpu_step()
        assert rules is not None
        cores = Ending(updates.kind.name, of_cores, rules[0])
        if updates.diagonals is not None:  # a row of a diagonal is one number
            diagonals = Ending("Adagrad" if updates.kind is ROW_WISE else updates.kind.name, of_diagonals, rules[1])
    if not (grad.numel() and call.num_ids):
        return flat, grad.new_zeros(call.num_ids) if of_weights else None
    sums = call.sum_slices(grad, targets)
    weight_gradients = call.gradients_of_weights(grad, targets) if of_weights else None
    call.finish(sums, cores, diagonals if diagonals.results else None)
    if updates is not None:
        updates.end_step()
    return flat, weight_gradients


_gradients = torch.library.custom_op("comera_rec::pool_pairs_backward", gradients, mutates_args=(), tags=UNSAFE, schema=(
    "(Tensor grad, Tensor targets, Tensor[] cores, Tensor[] diagonals, Tensor[] plan, Tensor offsets, "
    "Tensor? weights, str mode, int features, int num_cols, bool of_weights) -> (Tensor, Tensor)"
))  # fmt: skip


@_gradients.register_fake
def _(grad, targets, cores, diagonals, plan, offsets, weights, mode, features, num_cols, of_weights):  # type: ignore[no-untyped-def]
    size = sum(each.numel() for each in (*cores, *diagonals))
    return cores[0].new_empty(size), grad.new_empty(weights.shape[0] if of_weights else 0)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    cores, diagonals, plan, offsets, weights, *ctx.settings = inputs
    _, targets = output
    ctx.mark_non_differentiable(targets)
    ctx.num_cores = len(cores)
    ctx.save_for_backward(offsets, weights, targets, *plan, *cores, *diagonals)


def _differentiate(ctx, grad: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    offsets, weights, targets, pairs, slices, order, *parameters = ctx.saved_tensors
    cores, diagonals = parameters[: ctx.num_cores], parameters[ctx.num_cores :]
    of_weights = weights is not None and ctx.needs_input_grad[4]
    arguments = (cores, diagonals, [pairs, slices, order], offsets, weights, *ctx.settings, of_weights)
    flat, weight_gradients = _gradients(grad.contiguous(), targets, *arguments)
    parts = _cut(flat, _layouts(parameters))
    of_plan = [None] * 3
    return parts[: ctx.num_cores], parts[ctx.num_cores :], of_plan, None, weight_gradients if of_weights else None, None, None, None


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
        ctx.layouts = _layouts(parameters)  # those that kernels know; what hooks save may have others
        ctx.save_for_backward(pairs, slices, order, offsets, weights, targets, *parameters)
        return out

    @staticmethod
    @_disable_dynamo  # or compiled autograd would trace it
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, pairs: Tensor, slices: Tensor, order: Tensor, offsets: Tensor, weights: Tensor | None,
        targets: Tensor, *_: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        call = KernelCalls(ctx.tables, (pairs, slices, order), offsets, weights, *ctx.settings)
        grad, of_weights = grad.contiguous(), weights is not None and ctx.needs_input_grad[8]
        sizes = call.tables.sizes if ctx.updates is None else [math.prod(shape) for shape, _ in ctx.layouts]
        flat, weight_gradients = end_step(call, grad, targets, of_weights, sizes, ctx.updates)
        return *(None,) * 8, weight_gradients, *_cut(flat, ctx.layouts)
