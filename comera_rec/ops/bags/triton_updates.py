# ruff: noqa: N803, SIM102, SIM108 - Triton's custom: constants are in capitals, and what depends on them is a statement
# mypy: allow-untyped-defs
"""Kernels that end the backward of bags on a GPU: they write gradients, or update slices with an optimizer instead.

`tables_ptr` [T, COLUMNS] has for each table its rank, and where its core, its diagonal and its result start: a gradient, or a state
of the optimizer; in elements, counted from the first table's. An optimizer's step touches slices of the batch alone, which is all that
SGD and Adagrad change without weight decay; with it, other slices don't shrink.
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
_CHUNKS = 16  # whose parts are added up at once


@triton.jit
def _sum_parts(
    parts_ptr, slices_ptr, num_ids, num_slices, first_slice, local, is_head, last_key, goes_on, chunk, width, k, x, inside,
    SIDE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sums of the segments that start in a chunk, a tile [CHUNK, K, X]; only the last of them goes on in later chunks."""
    at = (k + x)[None, :, :]
    mask = is_head[:, None, None] & inside[None, :, :]
    total = tl.load(parts_ptr + local.to(tl.int64)[:, None, None] * width + at, mask=mask, other=0.0)
    if goes_on:
        later = tl.zeros_like(k + x).to(tl.float32)
        following = chunk + 1
        key = tl.load(slices_ptr + SIDE * num_ids + following * CHUNK, mask=following * CHUNK < num_ids, other=-1).to(tl.int32)
        while key == last_key:
            chunks = following + tl.arange(0, CHUNKS)
            keys = tl.load(slices_ptr + SIDE * num_ids + chunks * CHUNK, mask=chunks * CHUNK < num_ids, other=-1).to(tl.int32)
            slots = (num_slices + chunks)[:, None, None] * width + at
            later += tl.sum(tl.load(parts_ptr + slots, mask=(keys == last_key)[:, None, None] & inside[None, :, :], other=0.0), 0)
            following += CHUNKS
            key = tl.load(slices_ptr + SIDE * num_ids + following * CHUNK, mask=following * CHUNK < num_ids, other=-1).to(tl.int32)
        total += tl.where((local == last_key - first_slice)[:, None, None] & mask, later[None, :, :], 0.0)
    return total


@triton.jit(do_not_specialize=["num_ids", "num_slices", "first_slice", "rank_limit", "lr", "eps", "weight_decay"])
def _finish_slices(
    parts_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, core_ptr, d_ptr, result_ptr, products_ptr, lr_ptr,
    num_ids, num_slices, first_slice, rank_limit, lr, eps, weight_decay,
    SIDE: tl.constexpr, X: tl.constexpr, SCALED: tl.constexpr, OF_DIAGONAL: tl.constexpr, KIND: tl.constexpr,
    LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """The gradient of each slice, or its update: the sum of its parts times the diagonal. `rank_limit` is R.

    If OF_DIAGONAL, products[s, k] = the sum of the parts times the slice, which is what it gives to the diagonal's gradient.
    """
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    n = start + tl.arange(0, CHUNK)
    keys_ptr = slices_ptr + SIDE * num_ids
    key = tl.load(keys_ptr + n, mask=n < num_ids, other=-1).to(tl.int32)
    previous = tl.load(keys_ptr + n - 1, mask=(n > 0) & (n <= num_ids), other=-1).to(tl.int32)
    local = key - first_slice
    is_head = (n < num_ids) & (key != previous) & (local < num_slices)
    end = tl.minimum(start + CHUNK, num_ids)
    last_key = tl.load(keys_ptr + end - 1).to(tl.int32)
    after = tl.load(keys_ptr + end, mask=end < num_ids, other=-1).to(tl.int32)
    before = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1).to(tl.int32)
    goes_on = (after == last_key) & (before != last_key)
    u = tl.load(order_ptr + SIDE * num_ids + n, mask=is_head, other=SIDE * num_ids) - SIDE * num_ids
    of_table = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + u, mask=is_head, other=0).to(tl.int64) * COLUMNS
    slice_ = tl.load(pairs_ptr + SIDE * num_ids + u, mask=is_head, other=0).to(tl.int64)
    rank = tl.load(of_table + RANK).to(tl.int32)
    core_at = tl.load(of_table + CORE) + slice_ * (rank * X)
    result_at = tl.load(of_table + RESULT) + (slice_ if KIND == "RowWiseAdagrad" else slice_ * (rank * X))
    d_at = tl.load(of_table + DIAGONAL)
    rank = tl.where(is_head, rank, 0)
    if LR_IN_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    width = rank_limit * X
    rate = tl.zeros([CHUNK], dtype=tl.float32) + lr
    # Row-wise Adagrad needs the whole slice's gradient before it updates any of it: one more pass.
    for turn in tl.static_range(2 if KIND == "RowWiseAdagrad" else 1):
        squares = tl.zeros([CHUNK], dtype=tl.float32)
        for start_k in range(0, rank_limit, BLOCK_K):
            k = start_k + tl.arange(0, BLOCK_K)
            for start_x in tl.static_range(0, X, BLOCK_X):
                x = (start_x + tl.arange(0, BLOCK_X))[None, :]
                inside = (k < rank_limit)[:, None] & (x < X)
                g = _sum_parts(
                    parts_ptr, slices_ptr, num_ids, num_slices, first_slice, local, is_head, last_key, goes_on, chunk, width,
                    (k * X)[:, None], x, inside, SIDE, CHUNK, CHUNKS,
                )  # fmt: skip
                at = ((k * X)[:, None] + x)[None, :, :]
                mask = (k[None, :] < rank[:, None])[:, :, None] & (x < X)[None, :, :]
                if KIND != "gradient" or OF_DIAGONAL:
                    value = tl.load(core_ptr + core_at[:, None, None] + at, mask=mask, other=0.0).to(tl.float32)
                if OF_DIAGONAL:
                    if turn == 0:
                        product = tl.sum(g * value, 2)
                        product_at = local.to(tl.int64)[:, None] * rank_limit + k[None, :]
                        if start_x > 0:
                            product += tl.load(products_ptr + product_at, mask=k[None, :] < rank[:, None], other=0.0)
                        tl.store(products_ptr + product_at, product, mask=k[None, :] < rank[:, None])
                if SCALED:
                    g *= tl.load(d_ptr + d_at[:, None] + k[None, :], mask=k[None, :] < rank[:, None], other=0.0).to(tl.float32)[:, :, None]
                if KIND == "gradient":
                    tl.store(result_ptr + result_at[:, None, None] + at, g.to(result_ptr.dtype.element_ty), mask=mask)
                else:
                    g = tl.where(mask, g + weight_decay * value, 0.0)
                    if KIND == "RowWiseAdagrad":
                        if turn == 0:
                            squares += tl.sum(tl.sum(g * g, 2), 1)
                        else:
                            value -= rate[:, None, None] * g
                    elif KIND == "Adagrad":
                        sums_at = result_ptr + result_at[:, None, None] + at
                        sums = tl.load(sums_at, mask=mask, other=1.0).to(tl.float32) + g * g
                        tl.store(sums_at, sums.to(result_ptr.dtype.element_ty), mask=mask)
                        value -= lr * g / (tl.sqrt(sums) + eps)
                    else:
                        value -= lr * g
                    if KIND != "RowWiseAdagrad" or turn == 1:
                        tl.store(core_ptr + core_at[:, None, None] + at, value.to(core_ptr.dtype.element_ty), mask=mask)
        if KIND == "RowWiseAdagrad":
            if turn == 0:
                numbers = tl.maximum(rank * X, 1).to(tl.float32)
                sums = tl.load(result_ptr + result_at, mask=is_head, other=0.0) + squares / numbers
                tl.store(result_ptr + result_at, sums, mask=is_head)
                rate = lr / (tl.sqrt(sums) + eps)


@triton.jit(do_not_specialize=["rank_limit", "lr", "eps", "weight_decay"])
def _finish_diagonals(
    products_ptr, tables_ptr, d_ptr, result_ptr, lr_ptr, rank_limit, lr, eps, weight_decay,
    KIND: tl.constexpr, LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of each diagonal, or its update: the sum over its table's trailing slices of products [s, k]."""
    of_table = tables_ptr + tl.program_id(0) * COLUMNS
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.load(of_table + FIRST_SLICE)
    count = tl.load(of_table + NUM_SLICES)
    mask = k < tl.load(of_table + RANK)
    g = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[:, None]
        at = (first + s) * rank_limit + k[None, :]
        g += tl.sum(tl.load(products_ptr + at, mask=(s < count) & mask[None, :], other=0.0), 0)
    result = result_ptr + tl.load(of_table + RESULT) + k
    if KIND == "gradient":
        tl.store(result, g.to(result_ptr.dtype.element_ty), mask=mask)
    else:
        if LR_IN_TENSOR:
            lr = tl.load(lr_ptr).to(tl.float32)
        at = d_ptr + tl.load(of_table + DIAGONAL) + k
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        g += weight_decay * value
        if KIND == "Adagrad":
            sums = tl.load(result, mask=mask, other=1.0).to(tl.float32) + g * g
            tl.store(result, sums.to(result_ptr.dtype.element_ty), mask=mask)
            value -= lr * g / (tl.sqrt(sums) + eps)
        else:
            value -= lr * g
        tl.store(at, value.to(d_ptr.dtype.element_ty), mask=mask)


def finish_launch(
    sizes: Sizes, side: int, kind: str, settings: dict[str, float], *, of_diagonal: bool, lr_in_tensor: bool = False
) -> Launch:
    """Of `_finish_slices`, which is compiled once for all ranks."""
    x = (sizes.n1, sizes.n2)[side]
    block_x = block(x, 64)
    return Launch(
        kernel=_finish_slices,
        grid=(triton.cdiv(sizes.num_ids, CHUNK),),
        numbers={
            "num_ids": sizes.num_ids, "num_slices": sizes.counts[side], "first_slice": sizes.first_slice(side),
            "rank_limit": sizes.rank, **settings,
        },
        constants={
            "SIDE": side, "X": x, "SCALED": sizes.scaled, "OF_DIAGONAL": of_diagonal, "KIND": kind, "LR_IN_TENSOR": lr_in_tensor,
            "COLUMNS": COLUMNS.value, "CHUNK": CHUNK, "CHUNKS": _CHUNKS, "BLOCK_K": max(1, 64 // block_x), "BLOCK_X": block_x,
        },
        num_warps=4,
    )  # fmt: skip


def diagonals_launch(sizes: Sizes, num_tables: int, kind: str, settings: dict[str, float], *, lr_in_tensor: bool = False) -> Launch:
    """Of `_finish_diagonals`, which is compiled once for all ranks."""
    columns = 16
    return Launch(
        kernel=_finish_diagonals,
        grid=(num_tables, triton.cdiv(sizes.rank, columns)),
        numbers={"rank_limit": sizes.rank, **settings},
        constants={"KIND": kind, "LR_IN_TENSOR": lr_in_tensor, "COLUMNS": SLICES.value, "BLOCK_S": 512, "BLOCK_K": columns},
        num_warps=8,
    )
