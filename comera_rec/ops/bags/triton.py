# ruff: noqa: N803 - Triton's custom: constants are in capitals
# mypy: allow-untyped-defs
"""Pooling unique rows into bags on a GPU, in Triton; `reference.pool_rows` says what it computes.

L ids, U unique rows of N columns, F features of B bags each; W numbers from one row to the next. The gradient of a row is a sum
over the ids that are it, in the order of the plan, which sorted them already: sums have a fixed order and nothing is sorted again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comera_rec.ops.gathered_matmul.triton import parts_launch
from comera_rec.ops.launch import Launch, block
from comera_rec.ops.plan import LookupPlan

CHUNK = 32
"""Ids of one program of `_sum_ids`."""
_NO_BAG = -1


@triton.jit(do_not_specialize=["num_bags", "bags_of_feature"])
def _pool(
    rows_ptr, inverse_ptr, offsets_ptr, weights_ptr, out_ptr, bags_ptr, chosen_ptr, num_bags, bags_of_feature,
    N: tl.constexpr, W: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[b, f, :] = the pooled rows of bag f * B + b; bags[l] = the bag of id l; of "max" chosen[bag, :] = each number's id."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = bag < num_bags
    start = tl.load(offsets_ptr + bag, mask=there, other=0)
    end = tl.load(offsets_ptr + bag + 1, mask=there, other=0)
    total = tl.zeros([BLOCK_B, BLOCK_N], dtype=tl.float32)
    chosen = tl.full([BLOCK_B, BLOCK_N], -1, dtype=tl.int32)
    for step in range(tl.max(end - start)):
        id_ = start + step
        real = id_ < end
        row = tl.load(inverse_ptr + id_, mask=real, other=0).to(tl.int64)
        value = tl.load(rows_ptr + row[:, None] * W + j, mask=real[:, None] & (j < N), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + id_, mask=real, other=0.0).to(tl.float32)[:, None]
        if MODE == "max":
            larger = real[:, None] & ((value > total) | (chosen < 0))
            total = tl.where(larger, value, total)
            chosen = tl.where(larger, id_[:, None].to(tl.int32), chosen)
        else:
            total += value
        if tl.program_id(1) == 0:
            tl.store(bags_ptr + id_, bag.to(tl.int32), mask=real)
    if MODE == "mean":
        total = total / tl.maximum(end - start, 1)[:, None].to(tl.float32)
    inside = there[:, None] & (j < N)
    if MODE == "max":
        tl.store(chosen_ptr + bag[:, None] * N + j, chosen, mask=inside)
    features = num_bags // bags_of_feature
    at = (bag % bags_of_feature * features + bag // bags_of_feature)[:, None] * N + j
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature"])
def _sum_ids(
    grad_ptr, order_ptr, inverse_ptr, offsets_ptr, weights_ptr, bags_ptr, chosen_ptr, sums_ptr, parts_ptr, sorted_ptr,
    num_ids, num_bags, bags_of_feature,
    N: tl.constexpr, W: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums[u, :] = what the bags of row u's ids hand back, as far as those ids lie within one chunk of the plan's order.

    Rows of several chunks leave parts, as in `_sum_segments`; sorted[n] = the row of the n-th id in order, for `_sum_parts`.
    """
    chunk = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    start = chunk * CHUNK
    n = start + tl.arange(0, CHUNK)
    real = n < num_ids
    last = tl.minimum(start + CHUNK, num_ids) - 1
    id_ = tl.load(order_ptr + n, mask=real, other=0).to(tl.int64)
    row = tl.load(inverse_ptr + id_, mask=real, other=-1).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(sorted_ptr + n, row, mask=real)
    first_row = tl.load(inverse_ptr + tl.load(order_ptr + start)).to(tl.int32)
    last_row = tl.load(inverse_ptr + tl.load(order_ptr + last)).to(tl.int32)
    earlier = tl.load(order_ptr + start - 1, mask=start > 0, other=0)
    later = tl.load(order_ptr + last + 1, mask=last + 1 < num_ids, other=0)
    before = tl.load(inverse_ptr + earlier, mask=start > 0, other=-1).to(tl.int32)
    after = tl.load(inverse_ptr + later, mask=last + 1 < num_ids, other=-1).to(tl.int32)

    bag = tl.load(bags_ptr + id_, mask=real, other=-1).to(tl.int64)
    pooled = bag >= 0
    features = num_bags // bags_of_feature
    at = (bag % bags_of_feature * features + bag // bags_of_feature)[:, None] * N + j
    grad = tl.load(grad_ptr + at, mask=pooled[:, None] & (j < N), other=0.0).to(tl.float32)
    if MODE == "max":
        chosen = tl.load(chosen_ptr + bag[:, None] * N + j, mask=pooled[:, None] & (j < N), other=-1)
        grad = tl.where(chosen == id_[:, None].to(tl.int32), grad, 0.0)
    if MODE == "mean":
        begin = tl.load(offsets_ptr + bag, mask=pooled, other=0)
        grad = grad / (tl.load(offsets_ptr + bag + 1, mask=pooled, other=1) - begin)[:, None].to(tl.float32)
    if WEIGHTED:
        grad *= tl.load(weights_ptr + id_, mask=real, other=0.0).to(tl.float32)[:, None]
    # Rows ascend by one along the order, so the chunk's are first_row, first_row + 1, ...
    r = tl.arange(0, CHUNK)[:, None]
    is_mine = (row - first_row)[None, :] == r
    total = tl.dot(is_mine.to(tl.float32), grad, input_precision="ieee", out_dtype=tl.float32)
    here = first_row + r
    earlier_part, later_part = tl.where(before == first_row, first_row, -1), tl.where(after == last_row, last_row, -1)
    is_part = (here == earlier_part) | (here == later_part)
    is_whole = (here != earlier_part) & (here != later_part)
    inside = (here <= last_row) & (j < N)
    tl.store(parts_ptr + (2 * chunk + (r > 0).to(tl.int32)) * W + j, total, mask=inside & is_part)
    tl.store(sums_ptr + here.to(tl.int64) * W + j, total.to(sums_ptr.dtype.element_ty), mask=inside & is_whole)


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature"])
def _weight_gradients(
    grad_ptr, rows_ptr, inverse_ptr, bags_ptr, out_ptr, num_ids, num_bags, bags_of_feature,
    N: tl.constexpr, W: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[l] = the gradient of id l's bag times its row; 0 of ids in no bag."""
    id_ = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    real = id_ < num_ids
    bag = tl.load(bags_ptr + id_, mask=real, other=-1).to(tl.int64)
    row = tl.load(inverse_ptr + id_, mask=real, other=0).to(tl.int64)
    at = (bag % bags_of_feature * (num_bags // bags_of_feature) + bag // bags_of_feature)[:, None] * N
    total = tl.zeros([BLOCK_L], dtype=tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)[None, :]
        mask = (bag >= 0)[:, None] & (j < N)
        grad = tl.load(grad_ptr + at + j, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad * tl.load(rows_ptr + row[:, None] * W + j, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(out_ptr + id_, total, mask=real)


def pool_launch(num_bags: int, features: int, num_cols: int, width: int, mode: str, *, weighted: bool) -> Launch:
    """Of `_pool`."""
    columns = block(num_cols, 128)
    bags = max(1, 1024 // columns)
    return Launch(
        kernel=_pool,
        grid=(triton.cdiv(num_bags, bags), triton.cdiv(num_cols, columns)),
        numbers={"num_bags": num_bags, "bags_of_feature": num_bags // features},
        constants={"N": num_cols, "W": width, "MODE": mode, "WEIGHTED": weighted, "BLOCK_B": bags, "BLOCK_N": columns},
        num_warps=2,
    )


def sum_ids_launch(num_ids: int, num_bags: int, features: int, num_cols: int, width: int, mode: str, *, weighted: bool) -> Launch:
    """Of `_sum_ids`."""
    columns = max(16, block(num_cols, 64))
    return Launch(
        kernel=_sum_ids,
        grid=(triton.cdiv(num_ids, CHUNK), triton.cdiv(num_cols, columns)),
        numbers={"num_ids": num_ids, "num_bags": num_bags, "bags_of_feature": num_bags // features},
        constants={"N": num_cols, "W": width, "MODE": mode, "WEIGHTED": weighted, "CHUNK": CHUNK, "BLOCK_N": columns},
        num_warps=4,
    )


def weights_launch(num_ids: int, num_bags: int, features: int, num_cols: int, width: int) -> Launch:
    """Of `_weight_gradients`."""
    columns = block(num_cols, 64)
    return Launch(
        kernel=_weight_gradients,
        grid=(triton.cdiv(num_ids, 16),),
        numbers={"num_ids": num_ids, "num_bags": num_bags, "bags_of_feature": num_bags // features},
        constants={"N": num_cols, "W": width, "BLOCK_L": 16, "BLOCK_N": columns},
        num_warps=2,
    )


def pool_into_bags(
    rows: Tensor, weights: Tensor | None, offsets: Tensor, inverse: Tensor, order: Tensor, mode: str, features: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bags, the bag of each id [L], and of "max" the id of each of their numbers."""
    num_bags, num_ids = offsets.shape[0] - 1, inverse.shape[0]
    out = rows.new_empty(num_bags // features, features * num_cols)
    bags = torch.full((num_ids,), _NO_BAG, dtype=torch.int32, device=rows.device)
    chosen = torch.empty(num_bags if mode == "max" else 0, num_cols, dtype=torch.int32, device=rows.device)
    if out.numel():
        launch = pool_launch(num_bags, features, num_cols, rows.shape[1], mode, weighted=weights is not None)
        launch(
            rows_ptr=rows, inverse_ptr=inverse, offsets_ptr=offsets, weights_ptr=rows if weights is None else weights,
            out_ptr=out, bags_ptr=bags, chosen_ptr=chosen,
        )  # fmt: skip
    return out, bags, chosen


_pool_rows = torch.library.custom_op("comera_rec::pool_rows", pool_into_bags, mutates_args=())


@_pool_rows.register_fake
def _(rows, weights, offsets, inverse, order, mode, features, num_cols):
    num_bags = offsets.shape[0] - 1
    out = rows.new_empty(num_bags // features, features * num_cols)
    bags = inverse.new_empty(inverse.shape[0], dtype=torch.int32)
    return out, bags, inverse.new_empty(num_bags if mode == "max" else 0, num_cols, dtype=torch.int32)


def gradients_of_rows(
    grad: Tensor, rows: Tensor, weights: Tensor | None, offsets: Tensor, inverse: Tensor, order: Tensor, bags: Tensor,
    chosen: Tensor, mode: str, features: int, num_cols: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of rows, undefined where no id is the row, and of weights; `grad` [B, F * N] is the bags'."""
    num_bags, num_ids, width = offsets.shape[0] - 1, inverse.shape[0], rows.shape[1]
    # Products have no gradient where the plan is padded: nobody reads those rows, so they needn't be written.
    of_rows = torch.zeros_like(rows) if width > num_cols else torch.empty_like(rows)
    of_weights = rows.new_zeros(0 if weights is None else num_ids)
    if grad.numel() and num_ids and rows.numel():
        parts = torch.zeros(2 * triton.cdiv(num_ids, CHUNK), width, dtype=torch.float32, device=rows.device)
        ordered = torch.empty(num_ids, dtype=torch.int32, device=rows.device)
        sum_ids_launch(num_ids, num_bags, features, num_cols, width, mode, weighted=weights is not None)(
            grad_ptr=grad, order_ptr=order, inverse_ptr=inverse, offsets_ptr=offsets,
            weights_ptr=rows if weights is None else weights, bags_ptr=bags, chosen_ptr=chosen,
            sums_ptr=of_rows, parts_ptr=parts, sorted_ptr=ordered,
        )  # fmt: skip
        parts_launch(num_ids, len(rows), width)(sums_ptr=of_rows, parts_ptr=parts, ids_ptr=ordered)
        if weights is not None:
            launch = weights_launch(num_ids, num_bags, features, num_cols, width)
            launch(grad_ptr=grad, rows_ptr=rows, inverse_ptr=inverse, bags_ptr=bags, out_ptr=of_weights)
    return of_rows, of_weights


_pool_rows_backward = torch.library.custom_op("comera_rec::pool_rows_backward", gradients_of_rows, mutates_args=())


@_pool_rows_backward.register_fake
def _(grad, rows, weights, offsets, inverse, order, bags, chosen, mode, features, num_cols):
    return torch.empty_like(rows), rows.new_empty(0 if weights is None else inverse.shape[0])


def _setup_context(ctx, inputs, output) -> None:
    rows, weights, offsets, inverse, order, *ctx.sizes = inputs
    _, bags, chosen = output
    ctx.mark_non_differentiable(bags, chosen)
    ctx.save_for_backward(rows, weights, offsets, inverse, order, bags, chosen)


def _differentiate(ctx, grad: Tensor, *_: Tensor):
    of_rows, of_weights = _pool_rows_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes)
    return of_rows, of_weights if ctx.saved_tensors[1] is not None else None, *(None,) * 6


torch.library.register_autograd(_pool_rows, _differentiate, setup_context=_setup_context)


def pool_rows(
    rows: Tensor, plan: LookupPlan, offsets: Tensor, weights: Tensor | None, *, mode: str, features: int, num_cols: int
) -> Tensor:
    """Rows [U, W] of a plan -> [B, F * N], the first N = num_cols columns of each; see `tt_bags`."""
    weights = None if weights is None else weights.contiguous()
    arguments = (offsets, plan.inverse.contiguous(), plan.order.contiguous(), mode, features, num_cols)
    out: Tensor = _pool_rows(rows.contiguous(), weights, *arguments)[0]
    return out
