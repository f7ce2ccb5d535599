# ruff: noqa: N803 - Triton's convention: constants are in capitals
# mypy: allow-untyped-defs
"""The Triton kernel that finds the two slices of every id, for all tables of order 2 at once. L ids, T tables."""

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
