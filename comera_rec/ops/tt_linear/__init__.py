"""`tt_linear`: rows times a TT matrix, in an order of products that suits the number of rows.

Shapes: B rows of the input, I in_features, O out_features; a part, formed from neighboring cores, is (r, m, n, s) like a core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.tt import Contraction, Tree, contract, scaled_cores, span


def tt_linear(
    x: Tensor,
    cores: Sequence[Tensor],
    diagonals: Sequence[Tensor],
    out_features: int,
    bias: Tensor | None,
    contraction: Contraction,
) -> Tensor:
    """Return y = x W + b with W = G_1 diag(D_1) G_2 ... G_d, in the given order; CoMERA, section 4.2 (arXiv 2405.14377).

    It uses plain matrix products, which autograd, autocast, torch.compile and torch.export support. Autograd follows the same
    contraction backwards, which is as cheap as any order (`tt/contraction.py`), and keeps x, the formed parts and the rows between
    parts: with L and R, only the output has size B x O.

    Args:
        x: [..., I], I at most m_1...m_d.
        cores: (r, m, n, s) each, all input modes before all output modes.
        diagonals: (r) or (r, 1) each, between neighboring cores.
        out_features: O, at most n_1...n_d.
        bias: [O], or None.
        contraction: the order of products, from `best_contractions`; the result is the same for any.

    Returns:
        [..., O].
    """
    batch, in_features = math.prod(x.shape[:-1]), x.shape[-1]
    parts, row_diagonals = _formed(cores, diagonals, contraction)
    height, rest, width = batch, math.prod([part.shape[1] for part in parts]), 1
    rows = x if x.dim() == 2 else x.reshape(batch, in_features)
    # Where one part contains all padding, it is cut from that part; otherwise rows are padded before and cut after.
    if parts[0].shape[1] == rest:
        parts[0], rest = parts[0][:, :in_features], in_features
    elif rest > in_features:
        rows = F.pad(rows, (0, rest - in_features))
    at_once = math.prod([part.shape[2] for part in parts[:-1]]) == 1
    if at_once:
        parts[-1] = parts[-1][:, :, :out_features]
    for part_rmns, diagonal in zip(parts, row_diagonals, strict=True):
        r, m, n, s = part_rmns.shape
        if diagonal is not None:
            rows = rows.reshape(height * rest, r) * diagonal.flatten()
        rest //= m
        if rest > 1 or (m > 1 and r > 1):
            rows = rows.reshape(height, m, rest, r).permute(0, 2, 3, 1)
        if rows.shape != (height * rest, r * m):  # even a view of the same shape would add a node to the graph
            rows = rows.reshape(height * rest, r * m)
        matrix = part_rmns.reshape(r * m, n * s)
        is_last = part_rmns is parts[-1]
        rows = torch.addmm(bias, rows, matrix) if is_last and at_once and bias is not None else rows @ matrix
        height, width = height * n, width * n
    if not at_once:
        rows = rows.reshape(batch, width)[:, :out_features]
        rows = rows.contiguous() if bias is None else rows + bias.to(rows.dtype)  # as addmm under autocast
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], out_features)


def _formed(
    cores: Sequence[Tensor], diagonals: Sequence[Tensor], contraction: Contraction
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the parts, and for each the D_k that scales the rows before it; other D_k are multiplied into the smaller neighbor."""
    firsts = [span(part)[0] for part in contraction.parts]
    on_rows = {first: diagonals[first - 1] for first in firsts if first and contraction.scale_rows}  # by the core after it
    scaled = scaled_cores(cores, [None if k in on_rows else diagonal for k, diagonal in enumerate(diagonals, start=1)])
    return [_joined(scaled, part) for part in contraction.parts], [on_rows.get(first) for first in firsts]


def _joined(cores: Sequence[Tensor], tree: Tree) -> Tensor:
    return cores[tree] if isinstance(tree, int) else contract([_joined(cores, branch) for branch in tree])
