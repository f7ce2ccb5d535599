"""The plan of a lookup: which rows a batch needs, and which products of slices make them.

L ids, U unique rows, T tables of d cores each, M_k slices of all tables' k-th cores together.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from comera_rec.ops.plan import reference


@dataclass(frozen=True)
class Product:
    """V products of the left and the right part of trains; the p[v]-th of the one meets the q[v]-th of the other.

    A part is a core, by its number (the slices of all tables end to end), or itself a product. -1 in p and q is padding.
    """

    left: Product | int
    right: Product | int
    p: Tensor
    q: Tensor


@dataclass(frozen=True, kw_only=True)
class LookupPlan:
    """What to compute for a batch.

    It depends on the ids and the row modes alone, not on the cores' values or ranks, so it can be made ahead of time.
    """

    rows: Product | Tensor
    """How to make the unique rows, ordered by table and id; for d = 1 just their slices, [U]."""
    inverse: Tensor
    """[L]: which unique row each id is."""
    order: Tensor
    """[L]: ids sorted by the row they are; those of row u are order[starts[u]:starts[u + 1]]."""
    starts: Tensor
    """[U + 1]."""


def plan_lookup(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]], *, static: bool | None = None) -> LookupPlan:
    """Find the unique rows of a batch over several tables, and the unique leading and trailing digits among them.

    Args:
        ids: per table its row ids, of any shape, in [0, m_1...m_d).
        row_shapes: per table the modes (m_1..m_d), d alike for all.
        static: whether to pad everything to the size of the worst case, so that sizes follow from shapes alone, as a CUDA graph and
            torch.compile need it. Default: everywhere but in eager mode on CPU.

    Returns:
        The plan. Its ids are those of all tables, flattened and laid end to end.
    """
    if static is None:
        static = ids[0].device.type != "cpu" or torch.compiler.is_compiling()
    # Imported late, because whoever only imports the package need not wait for Numba.
    steps = reference if static else importlib.import_module("comera_rec.ops.plan.numba")
    unique, inverse, order, starts = steps.unique_rows([tensor.flatten() for tensor in ids], _sizes(row_shapes))
    rows = unique if len(row_shapes[0]) == 1 else _split(steps, unique, row_shapes, first_core=0)
    return LookupPlan(rows=rows, inverse=inverse, order=order, starts=starts)


def _split(steps: ModuleType, keys: Tensor, modes: Sequence[Sequence[int]], first_core: int) -> Product:
    """The products for keys over some of the cores, whose row modes are given per table.

    A key counts the keys of the tables before its own.
    """
    # With ids ordered by frequency leading digits repeat more than trailing ones, so the longer part is the leading one.
    cut = (len(modes[0]) + 1) // 2
    parts = [shape[:cut] for shape in modes], [shape[cut:] for shape in modes]
    nodes: list[Product | int] = []
    ids = []
    halves = steps.split_keys(keys, *map(_sizes, parts))
    for part, half, core in zip(parts, halves, (first_core, first_core + cut), strict=True):
        if len(part[0]) == 1:
            nodes.append(core)
            ids.append(half)
        else:
            unique, inverse = steps.compact_keys(half, sum(_sizes(part)))
            nodes.append(_split(steps, unique, part, core))
            ids.append(inverse)
    return Product(nodes[0], nodes[1], ids[0], ids[1])


def _sizes(modes: Sequence[Sequence[int]]) -> list[int]:
    return [math.prod(shape) for shape in modes]
