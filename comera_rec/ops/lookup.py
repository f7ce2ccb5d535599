"""Rows of a tensor-train table for unique ids: the plan (which slices meet) and its execution.

U unique rows; d cores, cut after core s into a left part L [.., n_left, r] over the leading digits and a right part R [.., r,
n_right] over the trailing ones. Slices shared by many rows are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.tt import TTShape, row_digits, rows_from_digits


@dataclass(frozen=True, kw_only=True)
class Deduplicated:
    """Row-level dedup of a batch: `ids[i] == rows[inverse[i]]`, `rows` ascending."""

    rows: Tensor  # [U]
    inverse: Tensor  # shape of the ids


def deduplicate(ids: Tensor, num_rows: int, *, table: str = "the table") -> Deduplicated:
    """Find the unique row ids of a batch and check that the table has them.

    On an accelerator the check is left out, because reading the extreme ids back would stall the device.

    Args:
        ids: integer row ids of any shape.
        num_rows: rows M of the table.
        table: its name, for the error.

    Raises:
        ValueError: naming the table, the id and the limit, if an id is outside [0, num_rows).
    """
    rows, inverse = torch.unique(ids, return_inverse=True)  # sorted
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and rows.numel():
        first, last = int(rows[0]), int(rows[-1])
        if first < 0 or last >= num_rows:
            bad = first if first < 0 else last
            raise ValueError(
                f"id {bad} is out of range for {table}: its ids run from 0 to {num_rows - 1}; check the data's vocabulary"
            )
    return Deduplicated(rows=rows, inverse=inverse)


def tt_rows(cores: Sequence[Tensor], rows: Tensor, shape: TTShape, *, impl: str = "auto") -> Tensor:
    """Rows of the table a train stands for, without forming the table.

    rows[u] = L[p(u)] R[q(u)]; L and R come from the same primitive one level down, for the unique leading and trailing digits only
    (index-level dedup). CoMERA, section 4.1 (arXiv 2405.14377).

    Args:
        cores: d tensors (r_{k-1}, m_k, n_k, r_k), rank parameters multiplied in.
        rows: [U] unique row ids, ascending.
        shape: modes and ranks.
        impl: implementation of the products, see `gathered_matmul`.

    Returns:
        [U, num_cols].
    """
    digits = row_digits(rows, shape.row_shape)
    if shape.order == 1:
        return cores[0][0, :, :, 0].index_select(0, digits[0])
    cut = shape.order // 2
    left, p = _chain(cores[:cut], digits[:cut], shape.row_shape[:cut], impl)
    right, q = _chain(cores[cut:], digits[cut:], shape.row_shape[cut:], impl)
    product = gathered_matmul(left.flatten(1, 2), right.flatten(2, 3), p, q, impl)
    return product.flatten(1, 2)


def _chain(cores: Sequence[Tensor], digits: Sequence[Tensor], radices: Sequence[int], impl: str) -> tuple[Tensor, Tensor]:
    """Product of neighbouring cores for the digit tuples that occur: ([V, r0, n, r1], ids [U] into V)."""
    if len(cores) == 1:
        return cores[0].permute(1, 0, 2, 3), digits[0]
    unique, inverse = torch.unique(rows_from_digits(digits, radices), return_inverse=True)
    cut = len(cores) // 2
    parts = row_digits(unique, radices)
    left, p = _chain(cores[:cut], parts[:cut], radices[:cut], impl)
    right, q = _chain(cores[cut:], parts[cut:], radices[cut:], impl)
    product = gathered_matmul(left.flatten(1, 2), right.flatten(2, 3), p, q, impl)
    return product.reshape(len(unique), left.shape[1], left.shape[2] * right.shape[2], right.shape[3]), inverse
