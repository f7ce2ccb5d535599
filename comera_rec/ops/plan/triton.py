# ruff: noqa: N803 - Triton's convention: constants are in capitals
# mypy: allow-untyped-defs
"""Triton kernels that find the two slices of every id, for all tables of order 2 or all hot rows at once. L ids, T tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from comera_rec.ops.launch import Launch, block

COLUMNS = 5
"""What a kernel gets for each table: rows, trailing slices, numbers of its first leading and trailing slice, and its first row."""


@triton.jit(do_not_specialize=["num_ids", "ids_of_table", "num_left"])
def _split_ids(
    ids_ptr, tables_ptr, pairs_ptr, keys_ptr, num_ids, ids_of_table, num_left,
    NUM_TABLES: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs[:, l] = the slices of id l within its table, and the table; keys[:, l] = both slices, numbered through all tables.

    Tables have ids_of_table ids each; if that is 0, ids include the rows of earlier tables. An id out of range ends all work on
    the GPU.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = position < num_ids
    id_ = tl.load(ids_ptr + position, mask=is_id, other=0).to(tl.int64)
    table = tl.zeros([BLOCK], dtype=tl.int32)
    if ids_of_table > 0:
        table += tl.minimum(position // ids_of_table, NUM_TABLES - 1).to(tl.int32)
    else:
        for step in tl.static_range(STEPS):
            later = table + (1 << (STEPS - 1 - step))
            first = tl.load(tables_ptr + later * COLUMNS + 4, mask=later < NUM_TABLES, other=0)
            table = tl.where((later < NUM_TABLES) & (first <= id_), later, table)
        id_ -= tl.load(tables_ptr + table * COLUMNS + 4)
    table_ptr = tables_ptr + table * COLUMNS
    inside = (id_ >= 0) & (id_ < tl.load(table_ptr))
    tl.device_assert(inside | ~is_id, "an id is out of range for its table: check the data, or run on the CPU, which names the id")
    id_ = tl.where(inside, id_, 0)
    trailing = tl.load(table_ptr + 1)
    p, q = (id_ // trailing).to(tl.int32), (id_ % trailing).to(tl.int32)
    tl.store(pairs_ptr + position, p, mask=is_id)
    tl.store(pairs_ptr + num_ids + position, q, mask=is_id)
    tl.store(pairs_ptr + 2 * num_ids + position, table, mask=is_id)
    left = p + tl.load(table_ptr + 2)
    right = q + tl.load(table_ptr + 3) + num_left + 1
    tl.store(keys_ptr + position, left.to(keys_ptr.dtype.element_ty), mask=is_id)
    tl.store(keys_ptr + num_ids + position, right.to(keys_ptr.dtype.element_ty), mask=is_id)


def split_launch(num_ids: int, ids_of_table: int, num_left: int, num_tables: int) -> Launch:
    """Return the launch of `_split_ids`."""
    size = block(num_ids, 256)
    return Launch(
        kernel=_split_ids,
        grid=(triton.cdiv(num_ids, size),),
        numbers={"num_ids": num_ids, "ids_of_table": ids_of_table, "num_left": num_left},
        constants={"NUM_TABLES": num_tables, "STEPS": (num_tables - 1).bit_length(), "COLUMNS": COLUMNS, "BLOCK": size},
        num_warps=4,
    )


def split_ids(ids: Tensor, tables: Tensor, pairs: Tensor, keys: Tensor, ids_of_table: int, num_left: int) -> None:
    """Fill pairs [3, L] and keys [2, L]."""
    launch = split_launch(len(ids), ids_of_table, num_left, len(tables))
    launch(ids_ptr=ids, tables_ptr=tables, pairs_ptr=pairs, keys_ptr=keys)


@triton.jit(do_not_specialize=["num_ids", "num_rows", "num_blocks", "most_blocks"])
def _find_blocks(
    pairs_ptr, tables_ptr, blocks_ptr, hot_pairs_ptr, keys_ptr, num_ids, num_rows, num_blocks, most_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """hot_pairs[:, l] = id l's row within its block of hot rows, 0, and the block; keys[:, l] = both, numbered through all blocks.

    `tables_ptr` [T, 4] holds trailing slices, the row of id 0, the first block and the number of blocks; `blocks_ptr` [., 3] a
    block's first row, its last row + 1, and the number of its first row among those of all blocks.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = position < num_ids
    table_ptr = tables_ptr + tl.load(pairs_ptr + 2 * num_ids + position, mask=is_id, other=0).to(tl.int64) * 4
    p = tl.load(pairs_ptr + position, mask=is_id, other=0).to(tl.int64)
    q = tl.load(pairs_ptr + num_ids + position, mask=is_id, other=0).to(tl.int64)
    row = p * tl.load(table_ptr) + q + tl.load(table_ptr + 1)
    first_block, count = tl.load(table_ptr + 2), tl.load(table_ptr + 3)
    within, block, key = row * 0 - 1, row * 0 + num_blocks, row * 0 + num_rows
    for k in range(most_blocks):
        block_ptr = blocks_ptr + (first_block + k) * 3
        first = tl.load(block_ptr, mask=k < count, other=0)
        end = tl.load(block_ptr + 1, mask=k < count, other=0)
        inside = (row >= first) & (row < end)
        within = tl.where(inside, row - first, within)
        block = tl.where(inside, first_block + k, block)
        key = tl.where(inside, tl.load(block_ptr + 2, mask=k < count, other=0) + row - first, key)
    tl.store(hot_pairs_ptr + position, within.to(tl.int32), mask=is_id)
    tl.store(hot_pairs_ptr + num_ids + position, tl.minimum(within, 0).to(tl.int32), mask=is_id)
    tl.store(hot_pairs_ptr + 2 * num_ids + position, tl.where(within < 0, 0, block).to(tl.int32), mask=is_id)
    tl.store(keys_ptr + position, key.to(keys_ptr.dtype.element_ty), mask=is_id)
    tl.store(keys_ptr + num_ids + position, (num_rows + 1 + block).to(keys_ptr.dtype.element_ty), mask=is_id)


def blocks_launch(num_ids: int, num_rows: int, num_blocks: int, most_blocks: int) -> Launch:
    """Return the launch of `_find_blocks`; `most_blocks` is the largest number of blocks of a table."""
    size = block(num_ids, 256)
    return Launch(
        kernel=_find_blocks,
        grid=(triton.cdiv(num_ids, size),),
        numbers={"num_ids": num_ids, "num_rows": num_rows, "num_blocks": num_blocks, "most_blocks": most_blocks},
        constants={"BLOCK": size},
        num_warps=4,
    )
