# ruff: noqa: N803 - Triton's convention: constants are in capitals
# mypy: allow-untyped-defs
"""The Triton kernels that find the two slices of every id, and its hot row, for all tables at once. L ids, T tables."""

from functools import lru_cache

import triton
import triton.language as tl

from comera_rec.ops.launch import Kernel

IDS = 256
"""Ids that a program takes."""
COLUMNS = 5
"""What `_split_ids` gets for each table: rows, trailing slices, its first leading slice, trailing slice and feature."""
HOT_COLUMNS = tl.constexpr(5)
"""What `_split_hot_rows` gets for each table: the factor of p, the row of id 0, hot rows, and numbers of its first hot row and its
first block."""


@triton.jit(do_not_specialize=["num_ids", "num_features", "bags_of_feature", "num_left", "num_right"])
def _split_ids(
    ids_ptr, tables_ptr, offsets_ptr, pairs_ptr, keys_ptr, num_ids, num_features, bags_of_feature, num_left, num_right,
    NUM_TABLES: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs[:, l] = the slices of id l within its table, and the table; keys[:, l] = both slices, numbered through all tables.

    offsets[f * bags_of_feature] is the first id of feature f. Ids beyond the last feature are left out. An id out of range ends all
    work on the GPU.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = position < num_ids
    is_used = is_id & (position < tl.load(offsets_ptr + num_features.to(tl.int64) * bags_of_feature))
    id_ = tl.load(ids_ptr + position, mask=is_used, other=0).to(tl.int64)
    table = tl.zeros([BLOCK], dtype=tl.int32)
    for step in tl.static_range(STEPS):
        later = table + (1 << (STEPS - 1 - step))
        feature = tl.load(tables_ptr + later * COLUMNS + 4, mask=later < NUM_TABLES, other=0)
        first = tl.load(offsets_ptr + feature * bags_of_feature, mask=later < NUM_TABLES, other=0)
        table = tl.where((later < NUM_TABLES) & (first <= position), later, table)
    table_ptr = tables_ptr + table * COLUMNS
    inside = (id_ >= 0) & (id_ < tl.load(table_ptr))
    tl.device_assert(
        inside | ~is_used, "an id is out of range for its table: check the data, or run on the CPU, which names the id"
    )
    id_ = tl.where(inside, id_, 0)
    trailing = tl.load(table_ptr + 1)
    p, q = (id_ // trailing).to(tl.int32), (id_ % trailing).to(tl.int32)
    tl.store(pairs_ptr + position, tl.where(is_used, p, -1), mask=is_id)
    tl.store(pairs_ptr + num_ids + position, tl.where(is_used, q, -1), mask=is_id)
    tl.store(pairs_ptr + 2 * num_ids + position, table, mask=is_id)
    left = tl.where(is_used, p + tl.load(table_ptr + 2), num_left)
    right = tl.where(is_used, q + tl.load(table_ptr + 3), num_right) + num_left + 1
    tl.store(keys_ptr + position, left.to(keys_ptr.dtype.element_ty), mask=is_id)
    tl.store(keys_ptr + num_ids + position, right.to(keys_ptr.dtype.element_ty), mask=is_id)


@lru_cache(maxsize=256)
def split_kernel(num_tables: int) -> Kernel:
    """Return `_split_ids` for so many tables."""
    steps = (num_tables - 1).bit_length()
    return Kernel(_split_ids, num_warps=4, NUM_TABLES=num_tables, STEPS=steps, COLUMNS=COLUMNS, BLOCK=IDS)


@triton.jit(do_not_specialize=["num_ids", "num_rows", "num_blocks"])
def _split_hot_rows(
    pairs_ptr, tables_ptr, firsts_ptr, hot_pairs_ptr, keys_ptr, num_ids, num_rows, num_blocks,
    MOST_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hot_pairs[:, l] = the row of id l within its block, 0, and the block; -1, -1 and 0 if the id has no hot row.

    keys[:, l] = number of the row among those of all blocks, and of the block, from num_rows + 1 on. Blocks start at firsts.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = position < num_ids
    p = tl.load(pairs_ptr + position, mask=is_id, other=-1).to(tl.int64)
    q = tl.load(pairs_ptr + num_ids + position, mask=is_id, other=0).to(tl.int64)
    table_ptr = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + position, mask=is_id, other=0) * HOT_COLUMNS
    row = p * tl.load(table_ptr) + q + tl.load(table_ptr + 1)
    is_hot = (p >= 0) & (row < tl.load(table_ptr + 2))
    number = tl.where(is_hot, row + tl.load(table_ptr + 3), num_rows)
    block = tl.load(table_ptr + 4)
    for _ in tl.static_range(MOST_BLOCKS - 1):
        block += (number >= tl.load(firsts_ptr + tl.minimum(block + 1, num_blocks))).to(tl.int64)
    block = tl.where(is_hot, block, num_blocks)
    within = tl.where(is_hot, number - tl.load(firsts_ptr + block), -1)
    tl.store(hot_pairs_ptr + position, within.to(tl.int32), mask=is_id)
    tl.store(hot_pairs_ptr + num_ids + position, tl.minimum(within, 0).to(tl.int32), mask=is_id)
    tl.store(hot_pairs_ptr + 2 * num_ids + position, tl.where(is_hot, block, 0).to(tl.int32), mask=is_id)
    tl.store(keys_ptr + position, number.to(keys_ptr.dtype.element_ty), mask=is_id)
    tl.store(keys_ptr + num_ids + position, (block + num_rows + 1).to(keys_ptr.dtype.element_ty), mask=is_id)


@lru_cache(maxsize=256)
def hot_kernel(most_blocks: int) -> Kernel:
    """Return `_split_hot_rows` for tables of at most so many blocks."""
    return Kernel(_split_hot_rows, num_warps=4, MOST_BLOCKS=most_blocks, BLOCK=IDS)
