# ruff: noqa: N803, SIM102 - Triton's convention: constants are in capitals, and branches on them are statements
# mypy: allow-untyped-defs
"""Triton kernels that end the backward of bags: they write gradients or, instead, update slices with an optimizer.

`tables_ptr` [T, COLUMNS] holds the rank of each table and where its core, its diagonal and its result (a gradient, or a state of
the optimizer) start, in elements from those of the first table. A step updates only the slices of the batch. Without weight decay,
SGD and Adagrad change no others; with it, other slices don't shrink.
"""

from functools import lru_cache

import triton
import triton.language as tl

from comera_rec.ops.bags.triton import CHUNK, Sizes
from comera_rec.ops.launch import LEAST_RANK, Kernel, block

COLUMNS = tl.constexpr(9)
RANK, DIAGONAL, CORES, RESULTS = (tl.constexpr(column) for column in (0, 1, 2, 4))
DIAGONAL_RESULT, FIRST_SLICE, NUM_SLICES = (tl.constexpr(column) for column in (6, 7, 8))
GRADIENT, SGD, ADAGRAD, ROW_WISE = "gradient", "SGD", "Adagrad", "RowWiseAdagrad"
OWNERS = 128
"""Ids whose slices a program of `_sum_parts` finds owners for: four for each thread of a warp."""
GROUP = 16
"""Chunks whose parts `_sum_parts` adds up first."""
PARTS_AT_ONCE = 8, 32
"""Parts that each launch of `_sum_parts` adds at once: most slices have few, but the most frequent ones thousands."""
PART_COLUMNS = 128
"""Numbers of a sum that a program of `_sum_parts` adds up."""
DIAGONAL_SLICES = 1024
"""Trailing slices that `_finish_diagonals` adds up at once."""
SLICES_AT_ONCE = 8


@triton.jit(do_not_specialize=["num_ids", "num_left", "num_right", "eighth_left", "eighth_right"])
def _sum_parts(
    left_ptr, right_ptr, left_owners_ptr, right_owners_ptr, slices_ptr, order_ptr,
    num_ids, num_left, num_right, eighth_left, eighth_right,
    STEP: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of segments that continue beyond a chunk, for both sides, in two launches.

    The first, with STEP 1, adds the parts of each group of GROUP chunks, and finds owners: left_owners[s] = an id of leading slice
    s, which stays -1 if there is none; right_owners[s] likewise. The second, with STEP GROUP, adds the sums of groups. Sums of
    slices have 8 * eighth numbers.
    """
    if tl.program_id(2) == 0:
        if STEP == 1:
            _find_owners(left_owners_ptr, slices_ptr, order_ptr, num_ids, 0, 0, num_left, OWNERS)
        _sum_parts_of_side(left_ptr, slices_ptr, num_ids, 0, num_left, eighth_left * 8, STEP, CHUNK, GROUP, AT_ONCE, BLOCK)
    else:
        slices_ptr += num_ids
        if STEP == 1:
            _find_owners(right_owners_ptr, slices_ptr, order_ptr + num_ids, num_ids, num_ids, num_left + 1, num_right, OWNERS)
        _sum_parts_of_side(
            right_ptr, slices_ptr, num_ids, num_left + 1, num_right, eighth_right * 8, STEP, CHUNK, GROUP, AT_ONCE, BLOCK
        )  # fmt: skip


@triton.jit
def _find_owners(owners_ptr, slices_ptr, order_ptr, num_ids, first_id, first_slice, num_slices, BLOCK: tl.constexpr):
    """Write the owners of slices that start in this block of ids."""
    start = tl.program_id(0) * BLOCK
    if (tl.program_id(1) == 0) & (start < num_ids):
        position = start + tl.arange(0, BLOCK)
        is_id = position < num_ids
        slice_ = tl.load(slices_ptr + position, mask=is_id, other=0).to(tl.int32) - first_slice
        previous = tl.load(slices_ptr + position - 1, mask=is_id & (position > 0), other=-1).to(tl.int32) - first_slice
        starts = is_id & ((position == 0) | (previous < slice_)) & (slice_ < num_slices)
        owner = tl.load(order_ptr + position, mask=starts, other=0) - first_id
        tl.store(owners_ptr + slice_, owner.to(tl.int32), mask=starts)


@triton.jit
def _sum_parts_of_side(
    parts_ptr, slices_ptr, num_ids, first_slice, num_slices, size,
    STEP: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * STEP
    start, after = first * CHUNK, (first + STEP) * CHUNK
    # Triton's `&` evaluates both sides: every load has a mask of its own.
    segment = tl.load(slices_ptr + after, mask=after < num_ids, other=-1).to(tl.int32)
    ending = tl.load(slices_ptr + after - 1, mask=after < num_ids, other=-2).to(tl.int32)
    before = tl.load(slices_ptr + start - 1, mask=(start > 0) & (start < num_ids), other=-1).to(tl.int32)
    starts_here = before != segment
    takes_parts = starts_here | ((STEP == 1) & (first % GROUP == 0))
    end = (first // GROUP + 1) * GROUP if STEP == 1 else num_ids  # of chunks to add
    continues = (ending == segment) & (segment < first_slice + num_slices) & (first + STEP < end)
    if continues & takes_parts & (tl.program_id(1) * BLOCK < size):
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.where(starts_here, segment - first_slice, num_slices + first).to(tl.int64)
        at = parts_ptr + slot * size + element
        total = tl.load(at, mask=element < size, other=0.0)
        chunks = first + STEP + tl.arange(0, AT_ONCE) * STEP
        found = _continues(slices_ptr, chunks, end, num_ids, segment, CHUNK)
        while tl.max(found.to(tl.int32)) > 0:
            slots = parts_ptr + (num_slices + chunks).to(tl.int64)[:, None] * size + element[None, :]
            parts = tl.load(slots, mask=found[:, None] & (element < size)[None, :], other=0.0)
            chunks += AT_ONCE * STEP
            found = _continues(slices_ptr, chunks, end, num_ids, segment, CHUNK)  # loaded while the parts are
            total += tl.sum(parts, 0)
        tl.debug_barrier()  # other warps may still read the sum that this one replaces
        tl.store(at, total, mask=element < size)


@triton.jit
def _continues(slices_ptr, chunks, end, num_ids, segment, CHUNK: tl.constexpr):
    """Return which chunks start with ids of the segment."""
    positions = chunks * CHUNK
    keys = tl.load(slices_ptr + positions, mask=(chunks < end) & (positions < num_ids), other=-1).to(tl.int32)
    return keys == segment


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


@triton.jit(do_not_specialize=["num_ids", "num_left", "num_right", "rank_limit", "lr", "eps", "weight_decay"])
def _finish_slices(
    left_ptr, right_ptr, left_owners_ptr, right_owners_ptr, tables_ptr, pairs_ptr, a_ptr, b_ptr, d_ptr, left_result_ptr,
    right_result_ptr, products_ptr, lr_ptr, seed_ptr, num_ids, num_left, num_right, rank_limit, lr, eps, weight_decay,
    N1: tl.constexpr, N2: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr,
    LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_X1: tl.constexpr, BLOCK_K2: tl.constexpr, BLOCK_X2: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each slice that the batch uses, its sum times the diagonal, or update the slice. `rank_limit` is R.

    products[s, k] = the sum of trailing slice s times the slice, which is its contribution to the diagonal's gradient.
    """
    block = tl.program_id(0)
    left_blocks = (num_left + BLOCK_S - 1) // BLOCK_S
    if LR_IN_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    if block < left_blocks:
        _finish_side(
            left_ptr, left_owners_ptr, tables_ptr, pairs_ptr, a_ptr, d_ptr, left_result_ptr, products_ptr, seed_ptr,
            block, num_ids, num_left, rank_limit, lr, eps, weight_decay,
            0, N1, SCALED, ALIGNED, KIND, COLUMNS, BLOCK_S, BLOCK_K1, BLOCK_X1,
        )  # fmt: skip
    else:
        _finish_side(
            right_ptr, right_owners_ptr, tables_ptr, pairs_ptr, b_ptr, d_ptr, right_result_ptr, products_ptr, seed_ptr,
            block - left_blocks, num_ids, num_right, rank_limit, lr, eps, weight_decay,
            1, N2, SCALED, ALIGNED, KIND, COLUMNS, BLOCK_S, BLOCK_K2, BLOCK_X2,
        )  # fmt: skip


@triton.jit
def _finish_side(
    parts_ptr, owners_ptr, tables_ptr, pairs_ptr, core_ptr, d_ptr, result_ptr, products_ptr, seed_ptr,
    block, num_ids, num_slices, rank_limit, lr, eps, weight_decay,
    SIDE: tl.constexpr, X: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    OF_DIAGONAL: tl.constexpr = SCALED and SIDE == 1
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    owner = tl.load(owners_ptr + s, mask=s < num_slices, other=-1)
    is_used = owner >= 0
    table_ptr = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + owner, mask=is_used, other=0).to(tl.int64) * COLUMNS
    slice_ = tl.load(pairs_ptr + SIDE * num_ids + owner, mask=is_used, other=0).to(tl.int64)
    rank = tl.load(table_ptr + RANK).to(tl.int32)
    numbers = rank * X
    of_slice = (slice_ * numbers)[:, None, None]
    of_core = tl.load(table_ptr + (CORES + SIDE))[:, None, None] + of_slice
    core = core_ptr + of_core
    result_start = tl.load(table_ptr + (RESULTS + SIDE))
    sums = parts_ptr + (s.to(tl.int64) * (rank_limit * X))[:, None, None]
    result = result_ptr + result_start[:, None, None] + of_slice
    if ALIGNED:
        core, sums, result = (
            tl.multiple_of(core, (16, 16, 16)),
            tl.multiple_of(sums, (16, 16, 16)),
            tl.multiple_of(result, (16, 16, 16)),
        )
    diagonal_ptrs = d_ptr + tl.load(table_ptr + DIAGONAL)[:, None]
    rank = tl.where(is_used, rank, 0)
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
                        kept = _rounded(state, seed_ptr, 2 * SIDE + 1, of_core + at, result_ptr.dtype.element_ty)
                        tl.store(result + at, kept, mask=mask)
                        value -= lr * g / (tl.sqrt(state) + eps)
                    else:
                        value -= lr * g
                    if KIND != "RowWiseAdagrad" or turn == 1:
                        kept = _rounded(value, seed_ptr, 2 * SIDE, of_core + at, core_ptr.dtype.element_ty)
                        tl.store(core + at, kept, mask=mask)
            if OF_DIAGONAL:
                if turn == 0:
                    is_product = (s < num_slices)[:, None] & (k < rank_limit)[None, :]  # 0 of slices that are not used
                    tl.store(products_ptr + s.to(tl.int64)[:, None] * rank_limit + k[None, :], product, mask=is_product)
        if KIND == "RowWiseAdagrad":
            if turn == 0:
                state_at = result_ptr + result_start + slice_
                state = tl.load(state_at, mask=is_used, other=0.0) + squares / tl.maximum(numbers, 1).to(tl.float32)
                tl.debug_barrier()  # other warps still read the state that this one replaces
                tl.store(state_at, state, mask=is_used)
                rate = lr / (tl.sqrt(state) + eps)


@triton.jit(do_not_specialize=["rank_limit", "lr", "eps", "weight_decay"])
def _finish_diagonals(
    products_ptr, tables_ptr, d_ptr, result_ptr, lr_ptr, seed_ptr, rank_limit, lr, eps, weight_decay,
    KIND: tl.constexpr, LR_IN_TENSOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each diagonal, the sum of products [s, k] over its table's trailing slices, or update it."""
    table_ptr = tables_ptr + tl.program_id(0) * COLUMNS
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.load(table_ptr + FIRST_SLICE)
    count = tl.load(table_ptr + NUM_SLICES)
    mask = k < tl.load(table_ptr + RANK)
    g = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        at = (first + s)[:, None] * rank_limit + k[None, :]
        g += tl.sum(tl.load(products_ptr + at, mask=(s < count)[:, None] & mask[None, :], other=0.0), 0)
    result = result_ptr + tl.load(table_ptr + DIAGONAL_RESULT) + k
    if KIND == "gradient":
        tl.store(result, g.to(result_ptr.dtype.element_ty), mask=mask)
    else:
        if LR_IN_TENSOR:
            lr = tl.load(lr_ptr).to(tl.float32)
        diagonal = tl.load(table_ptr + DIAGONAL)
        at = d_ptr + diagonal + k
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        g += weight_decay * value
        if KIND == "Adagrad":
            sums = tl.load(result, mask=mask, other=1.0).to(tl.float32) + g * g
        tl.debug_barrier()  # there are more threads than numbers: other warps still read those that this one replaces
        if KIND == "Adagrad":
            tl.store(result, _rounded(sums, seed_ptr, 5, diagonal + k, result_ptr.dtype.element_ty), mask=mask)
            value -= lr * g / (tl.sqrt(sums) + eps)
        else:
            value -= lr * g
        tl.store(at, _rounded(value, seed_ptr, 4, diagonal + k, d_ptr.dtype.element_ty), mask=mask)


@lru_cache(maxsize=256)
def parts_kernel(step: int, group: int, at_once: int) -> Kernel:
    """Return `_sum_parts`, for all sizes."""
    return Kernel(
        _sum_parts, num_warps=1 if step == 1 else 8,
        STEP=step, CHUNK=CHUNK, GROUP=group, AT_ONCE=at_once, BLOCK=PART_COLUMNS, OWNERS=OWNERS,
    )  # fmt: skip


@lru_cache(maxsize=256)
def finish_kernel(sizes: Sizes, kind: str, lr_in_tensor: bool) -> Kernel:
    """Return `_finish_slices`, which is compiled once for all ranks; a program takes SLICES_AT_ONCE."""
    (block_k1, block_x1), (block_k2, block_x2) = ((max(1, 128 // block(x, 64)), block(x, 64)) for x in (sizes.n1, sizes.n2))
    return Kernel(
        _finish_slices, num_warps=4,
        N1=sizes.n1, N2=sizes.n2, SCALED=sizes.scaled, ALIGNED=sizes.aligned, KIND=kind, LR_IN_TENSOR=lr_in_tensor,
        COLUMNS=COLUMNS.value, BLOCK_S=SLICES_AT_ONCE, BLOCK_K1=block_k1, BLOCK_X1=block_x1, BLOCK_K2=block_k2, BLOCK_X2=block_x2,
    )  # fmt: skip


@lru_cache(maxsize=256)
def diagonals_kernel(kind: str, lr_in_tensor: bool) -> Kernel:
    """Return `_finish_diagonals`, which is compiled once for all ranks; a program takes LEAST_RANK numbers of a diagonal."""
    return Kernel(
        _finish_diagonals, num_warps=8,
        KIND=kind, LR_IN_TENSOR=lr_in_tensor, COLUMNS=COLUMNS.value, BLOCK_S=DIAGONAL_SLICES, BLOCK_K=LEAST_RANK,
    )  # fmt: skip
