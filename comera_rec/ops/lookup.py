"""Rows of tensor-train tables for a batch of ids: the plan (which slices meet) and its execution.

L ids, U unique rows, T tables whose trains differ only in their row modes. The tables' cores are stacked along the row digit, M_k
slices together, so that one call serves them all. d cores are cut after core s into a left part [.., n_left, r] over the leading
digits and a right part [.., r, n_right] over the trailing ones. Slices shared by many rows are computed once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.tt import row_digits, rows_from_digits


def check_ids(ids: Tensor, num_rows: int, table: str) -> None:
    """Check that a table has the rows a batch asks for.

    Native lookups answer an id out of range with an anonymous error, another table's row or a crash. On an accelerator the check is
    left out, because reading the extreme ids back would stall the device.

    Raises:
        ValueError: naming the table, the id and the limit, if an id is outside [0, num_rows).
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    first, last = (int(extreme) for extreme in ids.aminmax())
    if first < 0 or last >= num_rows:
        bad = first if first < 0 else last
        raise ValueError(f"id {bad} is out of range for {table}: its ids run from 0 to {num_rows - 1}; check the data's vocabulary")


@dataclass(frozen=True, kw_only=True)
class LookupPlan:
    """Row-level dedup of a batch. It depends on the ids and the row modes alone, not on the cores' values or ranks."""

    digits: tuple[Tensor, ...]
    """d tensors [U]: the slice of each stacked core that the unique row meets."""
    inverse: Tensor
    """Shape of the ids: which unique row each of them is."""


def plan_lookup(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]]) -> LookupPlan:
    """Find the unique rows of a batch over several tables, and their digits.

    Args:
        ids: per table its row ids, of any shape, in [0, m_1...m_d).
        row_shapes: per table the modes (m_1..m_d), d alike for all.

    Returns:
        The plan; `inverse` has the shape of the only table's ids, or, of several, that of all ids flattened and laid end to end.
    """
    if len(ids) == 1:
        rows, inverse = torch.unique(ids[0], return_inverse=True)
        return LookupPlan(digits=row_digits(rows, row_shapes[0]), inverse=inverse)
    # A row's key counts the rows of the tables before its own, so that one sort serves all tables and keeps each together.
    starts = [0, *itertools.accumulate(math.prod(shape) for shape in row_shapes)]
    keys = torch.cat([tensor.flatten().long() + start for tensor, start in zip(ids, starts, strict=False)])
    rows, inverse = torch.unique(keys, return_inverse=True)
    table = torch.searchsorted(torch.tensor(starts[1:], device=rows.device), rows, right=True)
    rows = rows - torch.tensor(starts, device=rows.device)[table]
    digits = []
    for k, modes in enumerate(zip(*row_shapes, strict=True)):
        weights = [math.prod(shape[k + 1 :]) for shape in row_shapes]
        stacked_before = list(itertools.accumulate(modes[:-1], initial=0))
        weight, mode, before = torch.tensor([weights, modes, stacked_before], device=rows.device)[:, table]
        digits.append(rows // weight % mode + before)
    return LookupPlan(digits=tuple(digits), inverse=inverse)


def stack_cores(trains: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Stack the cores (r_{k-1}, m_k, n_k, r_k) of several trains along the row digit: d tensors (M_k, r_{k-1}, n_k, r_k)."""
    if len(trains) == 1:
        return [core.transpose(0, 1) for core in trains[0]]
    return [torch.cat([core.transpose(0, 1) for core in cores]) for cores in zip(*trains, strict=True)]


def tt_rows(stacked: Sequence[Tensor], digits: Sequence[Tensor], *, impl: str = "auto") -> Tensor:
    """Rows of the tables that stacked trains stand for, without forming the tables.

    rows[u] = L[p(u)] R[q(u)]; L and R come from the same primitive one level down, for the unique leading and trailing digits only
    (index-level dedup). CoMERA, section 4.1 (arXiv 2405.14377).

    Args:
        stacked: d cores (M_k, r_{k-1}, n_k, r_k) from `stack_cores`, rank parameters multiplied in.
        digits: d tensors [U] from `plan_lookup`.
        impl: implementation of the products, see `gathered_matmul`.

    Returns:
        [U, n_1...n_d].
    """
    if len(stacked) == 1:
        return stacked[0][:, 0, :, 0].index_select(0, digits[0])
    cut = len(stacked) // 2
    left, p = _chain(stacked[:cut], digits[:cut], impl)
    right, q = _chain(stacked[cut:], digits[cut:], impl)
    return gathered_matmul(left.flatten(1, 2), right.flatten(2, 3), p, q, impl).flatten(1, 2)


def pool_bags(
    rows: Tensor,
    inverse: Tensor,
    offsets: Tensor | None,
    *,
    mode: str,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Pool bags of rows[inverse]; arguments and result as in `torch.nn.functional.embedding_bag`.

    Bags of one id each, as in Criteo's logs, are the rows themselves, and the gradient of a gather costs a third of a bag's.
    An accelerator is not asked whether they are, because it would stall on the answer.
    """
    if (
        offsets is not None
        and per_sample_weights is None
        and offsets.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch.equal(offsets, torch.arange(len(inverse) + include_last_offset, dtype=offsets.dtype))
    ):
        return rows.index_select(0, inverse)
    return F.embedding_bag(
        inverse,
        rows,
        None if offsets is None else offsets.to(inverse.dtype),
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
    )


def _chain(stacked: Sequence[Tensor], digits: Sequence[Tensor], impl: str) -> tuple[Tensor, Tensor]:
    """Product of neighbouring cores for the digit tuples that occur: ([V, r0, n, r1], ids [U] into V)."""
    if len(stacked) == 1:
        return stacked[0], digits[0]
    radices = [len(core) for core in stacked]
    unique, inverse = torch.unique(rows_from_digits(digits, radices), return_inverse=True)
    cut = len(stacked) // 2
    parts = row_digits(unique, radices)
    left, p = _chain(stacked[:cut], parts[:cut], impl)
    right, q = _chain(stacked[cut:], parts[cut:], impl)
    product = gathered_matmul(left.flatten(1, 2), right.flatten(2, 3), p, q, impl)
    return product.reshape(len(unique), left.shape[1], left.shape[2] * right.shape[2], right.shape[3]), inverse
