# ruff: noqa: N803 - Triton's convention: constants are in capitals
# mypy: allow-untyped-defs
"""Triton kernels for bags of rows on a GPU, each for all tables of a lookup; `gpu.py` calls them.

L ids, T tables, F features of B bags each; rows of N columns are products of a leading slice (n1 x r) and a trailing one (r x n2).
Slices are stored with the bond outermost: r x n1 and r x n2. A segment is the ids of one slice, in the order of the plan.

Every lane, a thread of one warp, computes tiles of 4 x 4 numbers in registers from operands that it reads itself: products of
slices are too small for shared memory or tensor cores to pay. Lanes are the last dimension of tensors, so that Triton leaves the
others to each thread.

`tables_ptr` [T, TABLE] holds the rank of each table and where its leading core, trailing core and diagonal start, in elements from
those of the first table. Every sum has a fixed order, so that results do not change from run to run.
"""

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from comera_rec.ops.launch import Kernel, block, ceil_div

CHUNK = 32
"""Ids that a program of `_sum_slices` takes: enough to reuse its accumulator, few enough to keep a GPU busy with 50,000 ids."""
LANES = 32
UNROLL = tl.constexpr(4)
TABLE = tl.constexpr(4)
RANK, LEADING, TRAILING, DIAGONAL = (tl.constexpr(column) for column in range(4))


class Sizes(NamedTuple):
    """What the kernels of a lookup are compiled for."""

    n1: int
    rank: int
    """R, the largest rank that sums of slices have room for."""
    n2: int
    num_cols: int
    """N, at most n1 n2."""
    scaled: bool
    """Whether there are diagonals."""
    aligned: bool
    """Whether every slice starts at a multiple of 16 bytes."""


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Load float32 numbers; if WHOLE, the mask is true everywhere and costs nothing."""
    values = tl.load(pointers) if WHOLE else tl.load(pointers, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _add_product(
    total, a_ptrs, b_ptrs, d_ptr, factor, i, j,
    N1: tl.constexpr, N2: tl.constexpr, SCALED: tl.constexpr, WHOLE_1: tl.constexpr, WHOLE_2: tl.constexpr,
):  # fmt: skip
    """Add factor times the product of one column of leading slices and one row of trailing ones."""
    if SCALED:
        factor *= tl.load(d_ptr).to(tl.float32)
    a = _load(a_ptrs, i < N1, WHOLE_1) * factor[None, :]
    b = _load(b_ptrs, j < N2, WHOLE_2)
    return total + a[:, None, :] * b[None, :, :]


@triton.jit
def _add_rows(
    total, a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, id_, real, weight, num_ids, i, j,
    N1: tl.constexpr, N2: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, WHOLE_1: tl.constexpr, WHOLE_2: tl.constexpr,
):  # fmt: skip
    """Add the weighted rows of ids, a tile for each lane; nothing for an id that isn't real or is left out.

    Nearly always all ids belong to one table, so the loop runs over tables and reads the numbers of each once. Lanes of another
    table read slice 0 of this one in vain.
    """
    p = tl.load(pairs_ptr + id_, mask=real, other=-1)
    q = tl.load(pairs_ptr + num_ids + id_, mask=real, other=0)
    table_of = tl.load(pairs_ptr + 2 * num_ids + id_, mask=real, other=0)
    is_used = p >= 0
    for table in range(tl.min(tl.where(is_used, table_of, 0x7FFFFFFF)), tl.max(tl.where(is_used, table_of, -1)) + 1):
        table_ptr = tables_ptr + table * TABLE
        rank = tl.load(table_ptr + RANK).to(tl.int32)
        selected = is_used & (table_of == table)
        a_ptrs = a_ptr + tl.load(table_ptr + LEADING) + (tl.where(selected, p, 0).to(tl.int64) * (rank * N1))[None, :]
        b_ptrs = b_ptr + tl.load(table_ptr + TRAILING) + (tl.where(selected, q, 0).to(tl.int64) * (rank * N2))[None, :]
        if ALIGNED:  # slices, but not their columns: what follows for these depends on the type
            a_ptrs, b_ptrs = tl.multiple_of(a_ptrs, (16, 16)), tl.multiple_of(b_ptrs, (16, 16))
        a_ptrs += i
        b_ptrs += j
        diagonal_ptr = d_ptr + tl.load(table_ptr + DIAGONAL)
        row, factor = total, weight
        for _ in range(rank // UNROLL):
            for k in tl.static_range(UNROLL):
                row = _add_product(
                    row, a_ptrs + k * N1, b_ptrs + k * N2, diagonal_ptr + k, factor, i, j, N1, N2, SCALED, WHOLE_1, WHOLE_2
                )  # fmt: skip
            a_ptrs += UNROLL * N1
            b_ptrs += UNROLL * N2
            diagonal_ptr += UNROLL
        for k in tl.static_range(UNROLL - 1):
            if k < rank % UNROLL:
                row = _add_product(
                    row, a_ptrs + k * N1, b_ptrs + k * N2, diagonal_ptr + k, factor, i, j, N1, N2, SCALED, WHOLE_1, WHOLE_2
                )  # fmt: skip
        total = tl.where(selected[None, None, :], row, total)
    return total


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature"])
def _pool(
    a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, offsets_ptr, weights_ptr, out_ptr, targets_ptr, num_ids, num_bags, bags_of_feature,
    N1: tl.constexpr, N2: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr,
    LANES: tl.constexpr, TILE_1: tl.constexpr, TILE_2: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Pool rows to bags; bag f * B + b is target b * F + f, a row of out [B * F, N]. A row is DOWN x ACROSS tiles.

    targets[l] = the target of id l.
    """
    TILES: tl.constexpr = min(DOWN * ACROSS, LANES)
    WHOLE_1: tl.constexpr = N1 == DOWN * TILE_1
    WHOLE_2: tl.constexpr = N2 == ACROSS * TILE_2
    lane = tl.arange(0, LANES)
    bag = tl.program_id(0) * (LANES // TILES) + lane // TILES
    tile = tl.program_id(1) * TILES + lane % TILES
    i = ((tile // ACROSS) * TILE_1)[None, :] + tl.arange(0, TILE_1)[:, None]
    j = ((tile % ACROSS) * TILE_2)[None, :] + tl.arange(0, TILE_2)[:, None]
    is_bag = bag < num_bags
    # 32-bit, because 64-bit divisions take a hundred instructions.
    features = num_bags // bags_of_feature
    feature = bag // bags_of_feature
    target = (bag - feature * bags_of_feature) * features + feature
    start = tl.load(offsets_ptr + bag, mask=is_bag, other=0)
    end = tl.load(offsets_ptr + bag + 1, mask=is_bag, other=0)
    ascend = ((bag > 0) | (start == 0)) & (start <= end) & (end <= num_ids)
    tl.device_assert(ascend, "offsets don't ascend from 0 to at most the number of ids: check them, or run on the CPU")
    start, end = start.to(tl.int32), end.to(tl.int32)
    total = tl.zeros([TILE_1, TILE_2, LANES], dtype=tl.float32)
    weight = tl.full([LANES], 1.0, dtype=tl.float32)
    for step in range(tl.max(end - start)):
        id_ = start + step
        real = id_ < end
        tl.store(targets_ptr + id_, target, mask=real & (tile == 0))
        if WEIGHTED:
            weight = tl.load(weights_ptr + id_, mask=real, other=0.0).to(tl.float32)
        total = _add_rows(
            total, a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, id_, real, weight, num_ids, i, j,
            N1, N2, SCALED, ALIGNED, WHOLE_1, WHOLE_2,
        )  # fmt: skip
    if MODE == "mean":
        total = total / tl.maximum(end - start, 1)[None, None, :].to(tl.float32)
    column = i[:, None, :] * N2 + j[None, :, :]
    inside = is_bag[None, None, :] & (i < N1)[:, None, :] & (j < N2)[None, :, :] & (column < N)
    at = (target.to(tl.int64) * N)[None, None, :] + column
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_columns(pointers, column, mask, ALIGNED: tl.constexpr):
    """Load the numbers of pointers [A, LANES] plus columns [C]: [C, A, LANES].

    Columns are neighbors in memory, and a thread loads all of its lanes' at once. In three dimensions it would not: which threads
    load what would then depend on the version of Triton. ALIGNED says that pointers are multiples of C numbers. The mask is
    [C, A, LANES], or [1, A, LANES], which is as fast as none.
    """
    C: tl.constexpr = column.shape[0]
    A: tl.constexpr = pointers.shape[0]
    LANES: tl.constexpr = pointers.shape[1]
    flat = tl.reshape(pointers, [A * LANES])
    if ALIGNED:
        flat = tl.multiple_of(flat, C * (pointers.dtype.element_ty.primitive_bitwidth // 8))
    flat = flat[None, :] + column[:, None]
    values = tl.load(flat) if mask is None else tl.load(flat, mask=tl.reshape(mask, [mask.shape[0], A * LANES]), other=0.0)
    return tl.reshape(values, [C, A, LANES])


@triton.jit
def _gradients(
    grad_ptr, target, real, first_x, y, SIDE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, N: tl.constexpr,
    TILE_X: tl.constexpr, STEP_X: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load the gradients [y, x] of targets: x along the slice that is summed, y along the other one; 0 if not real."""
    steps = STEP_X * tl.arange(0, TILE_X)
    pointers = (grad_ptr + target.to(tl.int64) * N)[None, :]
    lanes = real[None, None, :]
    if not WHOLE:
        x = first_x[None, None, :] + steps[None, :, None]
        lanes = lanes & (x < X) & ((x * Y + y[:, None, None] if SIDE == 0 else x + y[:, None, None] * X) < N)
    ROWS: tl.constexpr = 1 if WHOLE else y.shape[0]
    if SIDE == 0:
        mask = tl.broadcast_to(lanes, [ROWS, TILE_X, target.shape[0]])
        pointers += (first_x[None, :] + steps[:, None]) * Y
        g = _load_columns(pointers, y, mask, ALIGNED and N % 4 == 0 and Y % 4 == 0)
    else:
        if WHOLE:
            mask = tl.broadcast_to(lanes, [1, y.shape[0], target.shape[0]])
        else:
            mask = tl.permute(tl.broadcast_to(lanes, [ROWS, TILE_X, target.shape[0]]), [1, 0, 2])
        pointers += first_x[None, :] + (y * X)[:, None]
        g = tl.permute(_load_columns(pointers, steps, mask, ALIGNED and N % 4 == 0 and X % 4 == 0), [1, 0, 2])
    return g


@triton.jit
def _four(x):
    """Return x[0], x[1], x[2] and x[3]; nothing moves, because a thread holds all of its lanes' numbers."""
    x = tl.permute(tl.reshape(x, [2, 2, x.shape[1], x.shape[2]]), [2, 3, 0, 1])
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum_side(
    grad_ptr, other_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, targets_ptr, offsets_ptr, weights_ptr, parts_ptr,
    chunk, num_ids, num_bags, bags_of_feature, first_slice, num_slices,
    SIDE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, R: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, TILE_X: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Sum the products of one chunk for one side: of leading slices if SIDE is 0, of trailing ones if it is 1.

    A sum has DOWN tiles of 4 along the rank and ACROSS tiles along X; the remaining lanes take other ids.
    """
    TILES: tl.constexpr = min(DOWN * ACROSS, LANES)
    lane = tl.arange(0, LANES)
    tile = tl.program_id(1) * TILES + lane % TILES
    # Lanes that load together read neighboring rows, which share cache lines. Numbers along a row of gradients stay together.
    STEP_X: tl.constexpr = ACROSS if SIDE == 0 else 1
    k = (tile // ACROSS)[None, :] + DOWN * tl.arange(0, 4)[:, None]
    first_x = tile % ACROSS if SIDE == 0 else (tile % ACROSS) * TILE_X
    WHOLE: tl.constexpr = (X == ACROSS * TILE_X) and (N == X * Y)
    SCALED: tl.constexpr = MODE == "mean" or WEIGHTED
    slices_ptr += SIDE * num_ids
    start = chunk * CHUNK
    # Everything about the chunk's ids is loaded at once, and lanes exchange it: most time goes to loads that wait for loads.
    positions = start + tl.arange(0, CHUNK)
    is_id = positions < num_ids
    slices = tl.load(slices_ptr + positions, mask=is_id, other=-1).to(tl.int32) - first_slice
    ids = (tl.load(order_ptr + SIDE * num_ids + positions, mask=is_id, other=0) - SIDE * num_ids).to(tl.int32)
    other_slices = tl.load(pairs_ptr + (1 - SIDE) * num_ids + ids, mask=is_id, other=0)
    tables = tl.load(pairs_ptr + 2 * num_ids + ids, mask=is_id, other=0)
    is_pooled = is_id & (ids < tl.load(offsets_ptr + num_bags))
    targets = tl.load(targets_ptr + ids, mask=is_pooled, other=-1)
    factors = tl.full([CHUNK], 1.0, dtype=tl.float32)
    if MODE == "mean":
        features = num_bags // bags_of_feature
        bags = (targets % features) * bags_of_feature + targets // features
        lengths = tl.load(offsets_ptr + bags + 1, mask=is_pooled, other=1) - tl.load(offsets_ptr + bags, mask=is_pooled, other=0)
        factors = 1.0 / tl.maximum(lengths, 1).to(tl.float32)
    if WEIGHTED:
        factors = tl.load(weights_ptr + ids, mask=is_pooled, other=0.0).to(tl.float32)
    # Ids that are left out come last, as those of slice number `num_slices`.
    count = tl.sum(((slices >= 0) & (slices < num_slices)).to(tl.int32))
    before = tl.load(slices_ptr + start - 1, mask=start > 0, other=-1).to(tl.int32) - first_slice
    first = 0
    while first < count:
        is_first = tl.arange(0, CHUNK) == first
        segment = tl.max(tl.where(is_first, slices, -1))
        last = first + tl.sum((slices == segment).to(tl.int32))
        table_ptr = tables_ptr + tl.max(tl.where(is_first, tables, -1)) * TABLE
        rank = tl.load(table_ptr + RANK).to(tl.int32)
        others = other_ptr + tl.load(table_ptr + (TRAILING if SIDE == 0 else LEADING))
        row_of_k = tl.minimum(k, rank - 1) * Y  # sums beyond the rank are never read
        total = tl.zeros([4, TILE_X, LANES], dtype=tl.float32)
        for position in range(first, tl.where(rank > 0, last, first), LANES // TILES):
            n = position + lane // TILES
            at = tl.minimum(n, last - 1)
            target = tl.gather(targets, at, 0)
            real = (n < last) & (target >= 0)
            factor = tl.gather(factors, at, 0) if SCALED else factors
            o_ptrs = (others + tl.gather(other_slices, at, 0).to(tl.int64) * (rank * Y))[None, :] + row_of_k
            for column in tl.range(0, Y // 4, loop_unroll_factor=2):  # left to ptxas, unrolling would spill on sm_80
                y = column * 4 + tl.arange(0, 4)
                o0, o1, o2, o3 = _four(_load_columns(o_ptrs, y, None, ALIGNED and Y % 4 == 0).to(tl.float32))
                g = _gradients(grad_ptr, target, real, first_x, y, SIDE, X, Y, N, TILE_X, STEP_X, WHOLE, ALIGNED).to(tl.float32)
                if SCALED:
                    g *= factor[None, None, :]
                g0, g1, g2, g3 = _four(g)
                total += o0[:, None, :] * g0[None, :, :]
                total += o1[:, None, :] * g1[None, :, :]
                total += o2[:, None, :] * g2[None, :, :]
                total += o3[:, None, :] * g3[None, :, :]
            for column in tl.static_range(Y - Y % 4, Y):
                y = column + tl.arange(0, 1)
                g = _gradients(grad_ptr, target, real, first_x, y, SIDE, X, Y, N, TILE_X, STEP_X, WHOLE, ALIGNED).to(tl.float32)
                if SCALED:
                    g *= factor[None, None, :]
                total += tl.load(o_ptrs + column).to(tl.float32)[:, None, :] * g
        slot = tl.where(before == segment, num_slices + chunk, segment).to(tl.int64)
        # Groups of TILES lanes have taken one id after another; add up their sums.
        sums = tl.sum(tl.reshape(total, [4, TILE_X, LANES // TILES, TILES]), 2)
        of_sum = tl.program_id(1) * TILES + tl.arange(0, TILES)
        sum_k = (of_sum // ACROSS)[None, None, :] + DOWN * tl.arange(0, 4)[:, None, None]
        of_row = of_sum % ACROSS if SIDE == 0 else (of_sum % ACROSS) * TILE_X
        sum_x = of_row[None, None, :] + STEP_X * tl.arange(0, TILE_X)[None, :, None]
        tl.store(parts_ptr + slot * (R * X) + (sum_k * X + sum_x), sums, mask=(sum_k < R) & (sum_x < X))
        first, before = last, segment


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature", "num_left", "num_right", "num_owners"])
def _sum_slices(
    grad_ptr, a_ptr, b_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, targets_ptr, offsets_ptr, weights_ptr,
    left_ptr, right_ptr, owners_ptr, num_ids, num_bags, bags_of_feature, num_left, num_right, num_owners,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    TILE_1: tl.constexpr, TILE_2: tl.constexpr, DOWN: tl.constexpr, ACROSS_1: tl.constexpr, ACROSS_2: tl.constexpr,
):  # fmt: skip
    """left[s] = sum over the ids of leading slice s of the trailing slice [r, n2] times the gradient of the id's row [n1, n2]^T.

    right[s] likewise. These are the gradients of slices before scaling by the diagonal. If a segment continues in later chunks,
    their sums are in left[num_left + chunk]. Programs of both sides alternate, because both are sorted by table: a table's
    gradients, read for one side, are still in the cache for the other. Owners are set to -1 for the kernel that finds them.
    """
    if tl.program_id(1) == 0:
        for start in range(tl.program_id(0) * LANES, num_owners, tl.num_programs(0) * LANES):
            owner = start + tl.arange(0, LANES)
            tl.store(owners_ptr + owner, -1, mask=owner < num_owners)
    chunk = tl.program_id(0) // 2
    is_leading = tl.program_id(0) % 2 == 0
    if is_leading & (tl.program_id(1) * LANES < DOWN * ACROSS_1):
        _sum_side(
            grad_ptr, b_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, targets_ptr, offsets_ptr, weights_ptr,
            left_ptr, chunk, num_ids, num_bags, bags_of_feature, 0, num_left,
            0, N1, N2, R, N, ALIGNED, MODE, WEIGHTED, CHUNK, LANES, TILE_1, DOWN, ACROSS_1,
        )  # fmt: skip
    if (not is_leading) & (tl.program_id(1) * LANES < DOWN * ACROSS_2):
        _sum_side(
            grad_ptr, a_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, targets_ptr, offsets_ptr, weights_ptr,
            right_ptr, chunk, num_ids, num_bags, bags_of_feature, num_left + 1, num_right,
            1, N2, N1, R, N, ALIGNED, MODE, WEIGHTED, CHUNK, LANES, TILE_2, DOWN, ACROSS_2,
        )  # fmt: skip


@lru_cache(maxsize=256)
def pool_kernel(sizes: Sizes, mode: str, weighted: bool) -> tuple[Kernel, int, int]:
    """Return `_pool`, the bags that a program takes, and the programs that share a bag."""
    (tile_1, down), (tile_2, across) = _tiles(sizes.n1), _tiles(sizes.n2)
    at_once = min(down * across, LANES)
    kernel = Kernel(
        _pool, num_warps=1,
        N1=sizes.n1, N2=sizes.n2, N=sizes.num_cols, SCALED=sizes.scaled, ALIGNED=sizes.aligned, MODE=mode, WEIGHTED=weighted,
        LANES=LANES, TILE_1=tile_1, TILE_2=tile_2, DOWN=down, ACROSS=across,
    )  # fmt: skip
    return kernel, LANES // at_once, down * across // at_once


@lru_cache(maxsize=256)
def slices_kernel(sizes: Sizes, mode: str, weighted: bool) -> tuple[Kernel, int]:
    """Return `_sum_slices`, and the programs that share a chunk of ids."""
    (tile_1, across_1), (tile_2, across_2), (_, down) = _tiles(sizes.n1), _tiles(sizes.n2), _tiles(sizes.rank)
    kernel = Kernel(
        _sum_slices, num_warps=1,
        N1=sizes.n1, R=sizes.rank, N2=sizes.n2, N=sizes.num_cols, ALIGNED=sizes.aligned, MODE=mode, WEIGHTED=weighted,
        CHUNK=CHUNK, LANES=LANES, TILE_1=tile_1, TILE_2=tile_2, DOWN=down, ACROSS_1=across_1, ACROSS_2=across_2,
    )  # fmt: skip
    return kernel, ceil_div(down * max(across_1, across_2), LANES)


def _tiles(size: int) -> tuple[int, int]:
    """Return the side of a tile, and how many cover a size: powers of two."""
    side = block(size, 4)
    return side, block(ceil_div(size, side), 1 << 30)
