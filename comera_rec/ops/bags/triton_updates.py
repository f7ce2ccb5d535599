# ruff: noqa: N803, SIM102 - Triton's convention: constants are in capitals, and branches on them are statements
# mypy: allow-untyped-defs
"""Triton kernels that end the backward of bags: they write gradients or, instead, update slices with an optimizer.

`tables_ptr` [T, COLUMNS] holds the rank of each table and where its core, its diagonal and its result (a gradient, or a state of
the optimizer) start, in elements from those of the first table. A step updates only the slices of the batch. Without weight decay,
SGD and Adagrad change no others; with it, other slices don't shrink.
"""

from __future__ import annotations

import triton
import triton.language as tl

from comera_rec.ops.bags.triton import CHUNK, Sizes
from comera_rec.ops.launch import Launch, block

COLUMNS = tl.constexpr(4)
RANK, CORE, DIAGONAL, RESULT = (tl.constexpr(column) for column in range(4))
SLICES = tl.constexpr(6)
FIRST_SLICE, NUM_SLICES = (tl.constexpr(column) for column in (4, 5))
GRADIENT, SGD, ADAGRAD, ROW_WISE = "gradient", "SGD", "Adagrad", "RowWiseAdagrad"
OWNERS = 128
"""Ids whose slices a program of `_sum_parts` finds owners for: four for each thread of a warp."""
_SLICES_AT_ONCE = 8
_CHUNKS = 16  # chunks whose parts `_sum_parts` adds up at once


@triton.jit(do_not_specialize=["num_ids", "num_left", "num_right", "size_left", "size_right"])
def _sum_parts(
    left_ptr, right_ptr, left_owners_ptr, right_owners_ptr, slices_ptr, order_ptr,
    num_ids, num_left, num_right, size_left, size_right,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """If a segment starts in this chunk and continues beyond it, add the parts of later chunks to its sum; for both sides.

    left_owners[s] = an id of leading slice s, -1 if it has none; right_owners[s] likewise.
    """
    if tl.program_id(2) == 0:
        _find_owners(left_owners_ptr, slices_ptr, order_ptr, num_ids, 0, 0, num_left, OWNERS)
        _sum_parts_of_side(left_ptr, slices_ptr, num_ids, 0, num_left, size_left, CHUNK, CHUNKS, BLOCK)
    else:
        slices_ptr += num_ids
        _find_owners(right_owners_ptr, slices_ptr, order_ptr + num_ids, num_ids, num_ids, num_left + 1, num_right, OWNERS)
        _sum_parts_of_side(right_ptr, slices_ptr, num_ids, num_left + 1, num_right, size_right, CHUNK, CHUNKS, BLOCK)


@triton.jit
def _find_owners(owners_ptr, slices_ptr, order_ptr, num_ids, first_id, first_slice, num_slices, BLOCK: tl.constexpr):
    """Write the owners of slices that start in this block of ids, and -1 for unused slices before them; one block ends the list."""
    start = tl.program_id(0) * BLOCK
    if (tl.program_id(1) == 0) & (start <= num_ids):
        position = start + tl.arange(0, BLOCK)
        is_id = position < num_ids
        slice_ = tl.load(slices_ptr + position, mask=is_id, other=0).to(tl.int32) - first_slice
        slice_ = tl.where(is_id, slice_, num_slices)
        previous = (
            tl.load(slices_ptr + position - 1, mask=(position > 0) & (position <= num_ids), other=0).to(tl.int32) - first_slice
        )
        previous = tl.where(position == 0, -1, tl.where(position <= num_ids, previous, num_slices))
        for step in range(1, tl.max(slice_ - previous), 8):
            unused = (previous + step)[:, None] + tl.arange(0, 8)[None, :]
            tl.store(owners_ptr + unused, -1, mask=unused < slice_[:, None])
        starts = is_id & (previous < slice_) & (slice_ < num_slices)
        owner = tl.load(order_ptr + position, mask=starts, other=0) - first_id
        tl.store(owners_ptr + slice_, owner.to(tl.int32), mask=starts)


@triton.jit
def _sum_parts_of_side(
    parts_ptr, slices_ptr, num_ids, first_slice, num_slices, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0)
    start, after = chunk * CHUNK, (chunk + 1) * CHUNK
    # Triton's `&` evaluates both sides, so every load has a separate mask.
    segment = tl.load(slices_ptr + after, mask=after < num_ids, other=-1).to(tl.int32)
    ending = tl.load(slices_ptr + after - 1, mask=after < num_ids, other=-2).to(tl.int32)
    if (ending == segment) & (segment < first_slice + num_slices):
        before = tl.load(slices_ptr + start - 1, mask=start > 0, other=-1).to(tl.int32)
        if before != segment:
            element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            at = parts_ptr + (segment - first_slice).to(tl.int64) * size + element
            total = tl.load(at, mask=element < size, other=0.0)
            later = chunk + 1
            while tl.load(slices_ptr + later * CHUNK, mask=later * CHUNK < num_ids, other=-1).to(tl.int32) == segment:
                chunks = later + tl.arange(0, CHUNKS)
                keys = tl.load(slices_ptr + chunks * CHUNK, mask=chunks * CHUNK < num_ids, other=-1).to(tl.int32)
                slots = (num_slices + chunks).to(tl.int64)[:, None] * size + element[None, :]
                mask = (keys == segment)[:, None] & (element < size)[None, :]
                total += tl.sum(tl.load(parts_ptr + slots, mask=mask, other=0.0), 0)
                later += CHUNKS
            tl.store(at, total, mask=element < size)


@triton.jit
def _rounded(value, seed_ptr, stream, at, dtype: tl.constexpr):
    """Round to a type: to a 16-bit one at random such that the mean is exact, as in csrc/slices.h."""
    if dtype == tl.float32:
        return value
    random = tl.randint(tl.load(seed_ptr) + stream, at.to(tl.int32)).to(tl.int32, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    if dtype == tl.bfloat16:
        rounded = ((bits + (random & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    else:
        rounded = ((bits + (random & 0x1FFF)) & -8192).to(tl.float32, bitcast=True)
        small = value + ((random & 0xFFFF).to(tl.float32) - 32767.5) * 9.094947017729282e-13  # 2^-40: steps of 2^-24
        rounded = tl.where((bits & 0x7FFFFFFF) < 947912704, small, rounded)  # 2^-14
    return tl.where(finite, rounded, value).to(dtype)


@triton.jit(do_not_specialize=["num_ids", "num_slices", "rank_limit", "lr", "eps", "weight_decay"])
def _finish_slices(
    parts_ptr, tables_ptr, pairs_ptr, owners_ptr, core_ptr, d_ptr, result_ptr, products_ptr, lr_ptr, seed_ptr,
    num_ids, num_slices, rank_limit, lr, eps, weight_decay,
    SIDE: tl.constexpr, X: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, OF_DIAGONAL: tl.constexpr, KIND: tl.constexpr,
    LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each slice that the batch uses, its sum times the diagonal, or update the slice. `rank_limit` is R.

    If OF_DIAGONAL, products[s, k] = the sum times the slice, which is its contribution to the diagonal's gradient.
    """
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    owner = tl.load(owners_ptr + s, mask=s < num_slices, other=-1)
    is_used = owner >= 0
    table_ptr = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + owner, mask=is_used, other=0).to(tl.int64) * COLUMNS
    slice_ = tl.load(pairs_ptr + SIDE * num_ids + owner, mask=is_used, other=0).to(tl.int64)
    rank = tl.load(table_ptr + RANK).to(tl.int32)
    numbers = rank * X
    core = core_ptr + (tl.load(table_ptr + CORE) + slice_ * numbers)[:, None, None]
    result_start = tl.load(table_ptr + RESULT)
    sums = parts_ptr + (s.to(tl.int64) * (rank_limit * X))[:, None, None]
    result = result_ptr + (result_start + slice_ * numbers)[:, None, None]
    if ALIGNED:
        core, sums, result = (
            tl.multiple_of(core, (16, 16, 16)),
            tl.multiple_of(sums, (16, 16, 16)),
            tl.multiple_of(result, (16, 16, 16)),
        )
    diagonal_ptrs = d_ptr + tl.load(table_ptr + DIAGONAL)[:, None]
    rank = tl.where(is_used, rank, 0)
    if LR_IN_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    rate = tl.zeros([BLOCK_S], dtype=tl.float32) + lr
    # Row-wise Adagrad needs the whole slice's gradient before it updates any of it: one more pass.
    for turn in tl.static_range(2 if KIND == "RowWiseAdagrad" else 1):
        squares = tl.zeros([BLOCK_S], dtype=tl.float32)
        for start_k in range(0, rank_limit, BLOCK_K):
            k = start_k + tl.arange(0, BLOCK_K)
            of_rank = k[None, :] < rank[:, None]
            product = tl.zeros([BLOCK_S, BLOCK_K], dtype=tl.float32)
            for start_x in tl.static_range(0, X, BLOCK_X):
                x = (start_x + tl.arange(0, BLOCK_X))[None, None, :]
                at = (k * X)[None, :, None] + x
                mask = of_rank[:, :, None] & (x < X)
                g = tl.load(sums + at, mask=mask, other=0.0)
                if KIND != "gradient" or OF_DIAGONAL:
                    value = tl.load(core + at, mask=mask, other=0.0).to(tl.float32)
                if OF_DIAGONAL:
                    product += tl.sum(g * value, 2)
                if SCALED:
                    g *= tl.load(diagonal_ptrs + k[None, :], mask=of_rank, other=0.0).to(tl.float32)[:, :, None]
                if KIND == "gradient":
                    tl.store(result + at, g.to(result_ptr.dtype.element_ty), mask=mask)
                else:
                    g = tl.where(mask, g + weight_decay * value, 0.0)
                    if KIND == "RowWiseAdagrad":
                        if turn == 0:
                            squares += tl.sum(tl.sum(g * g, 2), 1)
                        else:
                            value -= rate[:, None, None] * g
                    elif KIND == "Adagrad":
                        state = tl.load(result + at, mask=mask, other=1.0).to(tl.float32) + g * g
                        kept = _rounded(state, seed_ptr, 1, (slice_ * numbers)[:, None, None] + at, result_ptr.dtype.element_ty)
                        tl.store(result + at, kept, mask=mask)
                        value -= lr * g / (tl.sqrt(state) + eps)
                    else:
                        value -= lr * g
                    if KIND != "RowWiseAdagrad" or turn == 1:
                        kept = _rounded(value, seed_ptr, 0, (slice_ * numbers)[:, None, None] + at, core_ptr.dtype.element_ty)
                        tl.store(core + at, kept, mask=mask)
            if OF_DIAGONAL:
                if turn == 0:
                    tl.store(products_ptr + s.to(tl.int64)[:, None] * rank_limit + k[None, :], product, mask=of_rank)
        if KIND == "RowWiseAdagrad":
            if turn == 0:
                state_at = result_ptr + result_start + slice_
                state = tl.load(state_at, mask=is_used, other=0.0) + squares / tl.maximum(numbers, 1).to(tl.float32)
                tl.debug_barrier()  # other warps still read the state that this one replaces
                tl.store(state_at, state, mask=is_used)
                rate = lr / (tl.sqrt(state) + eps)


@triton.jit(do_not_specialize=["rank_limit", "lr", "eps", "weight_decay"])
def _finish_diagonals(
    products_ptr, owners_ptr, tables_ptr, d_ptr, result_ptr, lr_ptr, seed_ptr, rank_limit, lr, eps, weight_decay,
    KIND: tl.constexpr, LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each diagonal, the sum of products [s, k] over its table's trailing slices in use, or update it."""
    table_ptr = tables_ptr + tl.program_id(0) * COLUMNS
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.load(table_ptr + FIRST_SLICE)
    count = tl.load(table_ptr + NUM_SLICES)
    mask = k < tl.load(table_ptr + RANK)
    g = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        is_used = tl.load(owners_ptr + first + s, mask=s < count, other=-1) >= 0
        at = (first + s)[:, None] * rank_limit + k[None, :]
        g += tl.sum(tl.load(products_ptr + at, mask=is_used[:, None] & mask[None, :], other=0.0), 0)
    result = result_ptr + tl.load(table_ptr + RESULT) + k
    if KIND == "gradient":
        tl.store(result, g.to(result_ptr.dtype.element_ty), mask=mask)
    else:
        if LR_IN_TENSOR:
            lr = tl.load(lr_ptr).to(tl.float32)
        at = d_ptr + tl.load(table_ptr + DIAGONAL) + k
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        g += weight_decay * value
        if KIND == "Adagrad":
            sums = tl.load(result, mask=mask, other=1.0).to(tl.float32) + g * g
            tl.store(result, _rounded(sums, seed_ptr, 1, k, result_ptr.dtype.element_ty), mask=mask)
            value -= lr * g / (tl.sqrt(sums) + eps)
        else:
            value -= lr * g
        tl.store(at, _rounded(value, seed_ptr, 0, k, d_ptr.dtype.element_ty), mask=mask)


def parts_launch(sizes: Sizes) -> Launch:
    """Return the launch of `_sum_parts`, which is compiled once for all ranks."""
    size_left, size_right = sizes.rank * sizes.n1, sizes.rank * sizes.n2
    columns = 128
    return Launch(
        kernel=_sum_parts,
        grid=(triton.cdiv(sizes.num_ids + 1, CHUNK), triton.cdiv(max(size_left, size_right), columns), 2),
        numbers={
            "num_ids": sizes.num_ids, "num_left": sizes.counts[0], "num_right": sizes.counts[1],
            "size_left": size_left, "size_right": size_right,
        },
        constants={"CHUNK": CHUNK, "CHUNKS": _CHUNKS, "BLOCK": columns, "OWNERS": OWNERS},
        num_warps=1,
    )  # fmt: skip


def finish_launch(
    sizes: Sizes, side: int, kind: str, settings: dict[str, float], *, of_diagonal: bool, lr_in_tensor: bool = False
) -> Launch:
    """Return the launch of `_finish_slices`, which is compiled once for all ranks."""
    x = (sizes.n1, sizes.n2)[side]
    block_x = block(x, 64)
    return Launch(
        kernel=_finish_slices,
        grid=(triton.cdiv(sizes.counts[side], _SLICES_AT_ONCE),),
        numbers={"num_ids": sizes.num_ids, "num_slices": sizes.counts[side], "rank_limit": sizes.rank, **settings},
        constants={
            "SIDE": side, "X": x, "SCALED": sizes.scaled, "ALIGNED": sizes.aligned, "OF_DIAGONAL": of_diagonal, "KIND": kind,
            "LR_IN_TENSOR": lr_in_tensor, "COLUMNS": COLUMNS.value,
            "BLOCK_S": _SLICES_AT_ONCE, "BLOCK_K": max(1, 128 // block_x), "BLOCK_X": block_x,
        },
        num_warps=4,
    )  # fmt: skip


def diagonals_launch(sizes: Sizes, num_tables: int, kind: str, settings: dict[str, float], *, lr_in_tensor: bool = False) -> Launch:
    """Return the launch of `_finish_diagonals`, which is compiled once for all ranks."""
    columns = 16
    return Launch(
        kernel=_finish_diagonals,
        grid=(num_tables, triton.cdiv(sizes.rank, columns)),
        numbers={"rank_limit": sizes.rank, **settings},
        constants={"KIND": kind, "LR_IN_TENSOR": lr_in_tensor, "COLUMNS": SLICES.value, "BLOCK_S": 512, "BLOCK_K": columns},
        num_warps=8,
    )
