# ruff: noqa: N803 - Triton's convention: constants are in capitals
# mypy: allow-untyped-defs
"""Triton kernels for bags of rows on a GPU, each for all tables of a lookup; `gpu.py` calls them.

L ids, T tables, F features of B bags each; rows of N columns are products of a leading slice (n1 x r) and a trailing one (r x n2).
Slices are stored with the bond outermost: r x n1 and r x n2. Kernels are compiled for a rank R; tables may have smaller ranks, and
what lies beyond them is masked. A segment is the ids of one slice, in the order of the plan.

`tables_ptr` [T, TABLE] holds the rank of each table and where its leading core, trailing core and diagonal start, in elements from
those of the first table. Every sum has a fixed order, so that results do not change from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from comera_rec.ops.launch import LEAST_DOT, Launch, block, warps

CHUNK = 32
"""Ids of one program of `_sum_slices`: enough to reuse its accumulator, few enough to keep a GPU busy with 50,000 ids."""
TABLE = tl.constexpr(4)
RANK, LEADING, TRAILING, DIAGONAL = (tl.constexpr(column) for column in range(4))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a lookup, from which its launches follow."""

    num_ids: int
    counts: tuple[int, int]
    """Leading and trailing slices of all tables."""
    n1: int
    rank: int
    """R."""
    n2: int
    num_cols: int
    """N, at most n1 n2."""
    scaled: bool
    """Whether there are diagonals."""
    aligned: bool
    """Whether every slice starts at a multiple of 16 bytes."""

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of kernels that form rows."""
        return {
            "N1": self.n1, "R": self.rank, "N2": self.n2, "N": self.num_cols, "SCALED": self.scaled, "ALIGNED": self.aligned,
        }  # fmt: skip

    def first_slice(self, side: int) -> int:
        """Return the number of the first leading (side 0) or trailing (side 1) slice in a plan."""
        return side * (self.counts[0] + 1)


@triton.jit
def _bag_at(bag, num_bags, bags_of_feature, N: tl.constexpr):
    """Return where a bag starts in [B, F * N]. Bag numbers are 32-bit, because 64-bit divisions take a hundred instructions."""
    features = num_bags // bags_of_feature
    feature = bag // bags_of_feature
    return ((bag - feature * bags_of_feature).to(tl.int64) * features + feature) * N


@triton.jit
def _form_rows(
    a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, id_, real, num_ids, i, j,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """Form the rows of ids [U], a tile of n1 x n2 each; zero where an id isn't real or is left out.

    Nearly always all ids belong to one table, so the loop runs over tables and reads the numbers of each once.
    """
    p = tl.load(pairs_ptr + id_, mask=real, other=-1)
    q = tl.load(pairs_ptr + num_ids + id_, mask=real, other=0)
    table_of = tl.load(pairs_ptr + 2 * num_ids + id_, mask=real, other=0)
    is_used = p >= 0
    row = tl.zeros([BLOCK_U, BLOCK_1, BLOCK_2], dtype=tl.float32)
    for table in range(tl.min(tl.where(is_used, table_of, 0x7FFFFFFF)), tl.max(tl.where(is_used, table_of, -1)) + 1):
        table_ptr = tables_ptr + table * TABLE
        rank = tl.load(table_ptr + RANK).to(tl.int32)
        selected = (is_used & (table_of == table))[:, None, None]
        a_ptrs = a_ptr + tl.load(table_ptr + LEADING) + tl.where(is_used, p, 0).to(tl.int64)[:, None, None] * (rank * N1)
        b_ptrs = b_ptr + tl.load(table_ptr + TRAILING) + q.to(tl.int64)[:, None, None] * (rank * N2)
        diagonal_ptr = d_ptr + tl.load(table_ptr + DIAGONAL)
        if ALIGNED:
            a_ptrs, b_ptrs = tl.multiple_of(a_ptrs, (16, 16, 16)), tl.multiple_of(b_ptrs, (16, 16, 16))
        if R < BLOCK_R:  # shorter than any dot
            used_rank = tl.where(selected, rank, 0)
            for k in tl.static_range(R):
                a = tl.load(a_ptrs + (k * N1 + i), mask=(k < used_rank) & (i < N1), other=0.0).to(tl.float32)
                b = tl.load(b_ptrs + (k * N2 + j), mask=(k < used_rank) & (j < N2), other=0.0).to(tl.float32)
                if SCALED:
                    b *= tl.load(diagonal_ptr + k, mask=k < rank, other=0.0).to(tl.float32)
                row += a * b
        else:
            for start in tl.static_range(0, R, BLOCK_R):
                k = start + tl.arange(0, BLOCK_R)
                k_a, k_b = k[None, None, :], k[None, :, None]
                a = tl.load(a_ptrs + (k_a * N1 + i), mask=selected & (k_a < rank) & (i < N1), other=0.0).to(tl.float32)
                b = tl.load(b_ptrs + (k_b * N2 + j), mask=selected & (k_b < rank) & (j < N2), other=0.0).to(tl.float32)
                if SCALED:
                    b *= tl.load(diagonal_ptr + k_b, mask=k_b < rank, other=0.0).to(tl.float32)
                row = tl.dot(a, b, row, input_precision="ieee", out_dtype=tl.float32)
    return row


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature"])
def _pool(
    a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, offsets_ptr, weights_ptr, out_ptr, bags_ptr, chosen_ptr,
    num_ids, num_bags, bags_of_feature,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """out[b, f, :] = the pooled rows of bag f * B + b; bags[l] = the bag of id l; for "max", chosen[bag, :] = its entries' ids."""
    bag = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    i = (tl.program_id(1) * BLOCK_1 + tl.arange(0, BLOCK_1))[None, :, None]
    j = (tl.program_id(2) * BLOCK_2 + tl.arange(0, BLOCK_2))[None, None, :]
    is_bag = bag < num_bags
    start = tl.load(offsets_ptr + bag, mask=is_bag, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + bag + 1, mask=is_bag, other=0).to(tl.int32)
    total = tl.zeros([BLOCK_U, BLOCK_1, BLOCK_2], dtype=tl.float32)
    if MODE == "max":
        chosen = tl.full([BLOCK_U, BLOCK_1, BLOCK_2], -1, dtype=tl.int32)
    for step in range(tl.max(end - start)):
        id_ = start + step
        real = id_ < end
        if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            tl.store(bags_ptr + id_, bag, mask=real)
        row = _form_rows(
            a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, id_, real, num_ids, i, j,
            N1, R, N2, SCALED, ALIGNED, BLOCK_U, BLOCK_1, BLOCK_R, BLOCK_2,
        )  # fmt: skip
        if WEIGHTED:
            row *= tl.load(weights_ptr + id_, mask=real, other=0.0).to(tl.float32)[:, None, None]
        if MODE == "max":
            larger = real[:, None, None] & ((row > total) | (chosen < 0))
            total = tl.where(larger, row, total)
            chosen = tl.where(larger, id_[:, None, None], chosen)
        else:
            total += row
    if MODE == "mean":
        total = total / tl.maximum(end - start, 1)[:, None, None].to(tl.float32)
    column = i * N2 + j
    inside = is_bag[:, None, None] & (i < N1) & (j < N2) & (column < N)
    if MODE == "max":
        tl.store(chosen_ptr + bag.to(tl.int64)[:, None, None] * N + column, chosen, mask=inside)
    at = _bag_at(bag, num_bags, bags_of_feature, N)[:, None, None] + column
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature", "first_slice", "num_slices"])
def _sum_slices(
    grad_ptr, other_ptr, tables_ptr, pairs_ptr, slices_ptr, order_ptr, bags_ptr, offsets_ptr, weights_ptr, chosen_ptr, parts_ptr,
    owners_ptr, num_ids, num_bags, bags_of_feature, first_slice, num_slices,
    SIDE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, R: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """parts[s] = sum over the ids of slice s of the other slice [r, Y] times the gradient of the id's bag [Y, X].

    This is the gradient of the slice before scaling by the diagonal: of leading slices if SIDE is 0, of trailing ones if it is 1.
    If a segment continues in later chunks, their sums are in parts[num_slices + chunk]. owners[s] = an id of slice s.
    """
    BLOCK: tl.constexpr = BLOCK_U * BLOCK_Y
    X_STEP: tl.constexpr = Y if SIDE == 0 else 1
    Y_STEP: tl.constexpr = 1 if SIDE == 0 else X
    chunk = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)[None, :]
    step = tl.arange(0, BLOCK)  # runs over ids and, within each, over Y
    slices_ptr += SIDE * num_ids
    order_ptr += SIDE * num_ids
    start = chunk * CHUNK
    positions = start + tl.arange(0, CHUNK)
    slices = tl.load(slices_ptr + positions, mask=positions < num_ids, other=-1).to(tl.int32) - first_slice
    # Ids that are left out come last, as those of slice number `num_slices`.
    end = start + tl.sum(((slices >= 0) & (slices < num_slices)).to(tl.int32))
    before = tl.load(slices_ptr + start - 1, mask=start > 0, other=-1).to(tl.int32) - first_slice
    end_of_bags = tl.load(offsets_ptr + num_bags)
    first = start
    while first < end:
        segment = tl.load(slices_ptr + first).to(tl.int32) - first_slice
        last = first + tl.sum((slices == segment).to(tl.int32))
        id_ = tl.load(order_ptr + first) - SIDE * num_ids
        table_ptr = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + id_).to(tl.int64) * TABLE
        rank = tl.load(table_ptr + RANK).to(tl.int32)
        others = other_ptr + tl.load(table_ptr + (TRAILING if SIDE == 0 else LEADING))
        total = tl.zeros([BLOCK_R, BLOCK_X], dtype=tl.float32)
        for position in range(first, last, BLOCK_U):
            n = position + step // BLOCK_Y
            real = n < last
            u = tl.load(order_ptr + n, mask=real, other=SIDE * num_ids) - SIDE * num_ids
            other = tl.load(pairs_ptr + (1 - SIDE) * num_ids + u, mask=real, other=0).to(tl.int64)
            real = real & (u < end_of_bags)
            bag = tl.load(bags_ptr + u, mask=real, other=0)
            bag_at = _bag_at(bag, num_bags, bags_of_feature, N)
            if MODE == "mean":
                length = tl.load(offsets_ptr + bag + 1) - tl.load(offsets_ptr + bag)
                factor = 1.0 / tl.maximum(length, 1).to(tl.float32)
            if WEIGHTED:
                factor = tl.load(weights_ptr + u, mask=real, other=0.0).to(tl.float32)
            for start_y in tl.static_range(0, Y, BLOCK_Y):
                y = start_y + step % BLOCK_Y
                column = (y * Y_STEP)[:, None] + x * X_STEP
                inside = (real & (y < Y))[:, None] & (x < X) & (column < N)
                grad = tl.load(grad_ptr + bag_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
                if MODE == "max":
                    chosen = tl.load(chosen_ptr + (bag.to(tl.int64) * N)[:, None] + column, mask=inside, other=-1)
                    grad = tl.where(chosen == u[:, None].to(tl.int32), grad, 0.0)
                if MODE == "mean" or WEIGHTED:
                    grad *= factor[:, None]
                slice_ = others + (other * (rank * Y))[None, :]
                if ALIGNED:
                    slice_ = tl.multiple_of(slice_, (16, 16))
                o = tl.load(slice_ + (k * Y + y[None, :]), mask=(real & (y < Y))[None, :] & (k < rank), other=0.0).to(tl.float32)
                total = tl.dot(o, grad, total, input_precision="ieee", out_dtype=tl.float32)
        is_later = (first == start) & (before == segment)
        if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            tl.store(owners_ptr + segment, id_.to(tl.int32), mask=~is_later)
        slot = tl.where(is_later, num_slices + chunk, segment.to(tl.int64))
        tl.store(parts_ptr + slot * (R * X) + (k * X + x), total, mask=(k < R) & (x < X))
        first = last


@triton.jit(do_not_specialize=["num_ids", "num_bags", "bags_of_feature"])
def _weight_gradients(
    grad_ptr, a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, bags_ptr, offsets_ptr, out_ptr, num_ids, num_bags, bags_of_feature,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """out[l] = the gradient of id l's bag times its row; 0 for ids in no bag."""
    id_ = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    real = id_ < num_ids
    pooled = real & (id_ < tl.load(offsets_ptr + num_bags))
    at = _bag_at(tl.load(bags_ptr + id_, mask=pooled, other=0), num_bags, bags_of_feature, N)
    total = tl.zeros([BLOCK_U], dtype=tl.float32)
    for start_i in tl.static_range(0, N1, BLOCK_1):
        for start_j in tl.static_range(0, N2, BLOCK_2):
            i = (start_i + tl.arange(0, BLOCK_1))[None, :, None]
            j = (start_j + tl.arange(0, BLOCK_2))[None, None, :]
            row = _form_rows(
                a_ptr, b_ptr, d_ptr, tables_ptr, pairs_ptr, id_, pooled, num_ids, i, j,
                N1, R, N2, SCALED, ALIGNED, BLOCK_U, BLOCK_1, BLOCK_R, BLOCK_2,
            )  # fmt: skip
            column = i * N2 + j
            inside = pooled[:, None, None] & (i < N1) & (j < N2) & (column < N)
            grad = tl.load(grad_ptr + at[:, None, None] + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(grad * row, 2), 1)
    tl.store(out_ptr + id_, total, mask=real)


def pool_launch(sizes: Sizes, *, num_bags: int, features: int, mode: str, weighted: bool) -> Launch:
    """Return the launch of `_pool`."""
    blocks = _row_blocks(sizes)
    grid = (num_bags, blocks["BLOCK_U"]), (sizes.n1, blocks["BLOCK_1"]), (sizes.n2, blocks["BLOCK_2"])
    return Launch(
        kernel=_pool,
        grid=tuple(triton.cdiv(*size) for size in grid),
        numbers={"num_ids": sizes.num_ids, "num_bags": num_bags, "bags_of_feature": num_bags // features},
        constants={**sizes.constants, "MODE": mode, "WEIGHTED": weighted, **blocks},
        num_warps=warps(blocks["BLOCK_U"] * blocks["BLOCK_1"] * blocks["BLOCK_2"]),
    )


def weights_launch(sizes: Sizes, *, num_bags: int, features: int) -> Launch:
    """Return the launch of `_weight_gradients`."""
    blocks = _row_blocks(sizes)
    return Launch(
        kernel=_weight_gradients,
        grid=(triton.cdiv(sizes.num_ids, blocks["BLOCK_U"]),),
        numbers={"num_ids": sizes.num_ids, "num_bags": num_bags, "bags_of_feature": num_bags // features},
        constants={**sizes.constants, **blocks},
        num_warps=warps(blocks["BLOCK_U"] * blocks["BLOCK_1"] * blocks["BLOCK_2"]),
    )


def slices_launch(sizes: Sizes, side: int, *, num_bags: int, features: int, mode: str, weighted: bool) -> Launch:
    """Return the launch of `_sum_slices`."""
    x, y = (sizes.n1, sizes.n2) if side == 0 else (sizes.n2, sizes.n1)
    block_r, block_x, block_y = block(sizes.rank, 32), block(x, 32), block(y, 32)
    return Launch(
        kernel=_sum_slices,
        grid=(triton.cdiv(sizes.num_ids, CHUNK), triton.cdiv(sizes.rank, block_r), triton.cdiv(x, block_x)),
        numbers={
            "num_ids": sizes.num_ids, "num_bags": num_bags, "bags_of_feature": num_bags // features,
            "first_slice": sizes.first_slice(side), "num_slices": sizes.counts[side],
        },
        constants={
            "SIDE": side, "X": x, "Y": y, "R": sizes.rank, "N": sizes.num_cols, "ALIGNED": sizes.aligned,
            "MODE": mode, "WEIGHTED": weighted,
            "CHUNK": CHUNK, "BLOCK_U": 32 // block_y, "BLOCK_X": block_x, "BLOCK_Y": block_y, "BLOCK_R": block_r,
        },
        num_warps=warps(block_x * block_r),
    )  # fmt: skip


def _row_blocks(sizes: Sizes) -> dict[str, int]:
    block_1, block_2 = block(sizes.n1, 32), block(sizes.n2, 64)
    rows = max(1, min(16, 256 // (block_1 * block_2)))
    return {"BLOCK_U": rows, "BLOCK_1": block_1, "BLOCK_R": LEAST_DOT, "BLOCK_2": block_2}
