"""`tt_linear`: rows times a tensor train, in an order of products chosen for their number.

Shapes: B rows of the input, I in_features, O out_features; P = B times the output modes that are done, q the input modes still to
come; a part of the train is (r, m, n, s), like a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.float8_matmul import float8_matmul
from comera_rec.tt import Contraction, Tree, contract, span


def tt_linear(
    x: Tensor,
    cores: Sequence[Tensor],
    diagonals: Sequence[Tensor],
    out_features: int,
    bias: Tensor | None,
    contraction: Contraction,
    float8: bool = False,
) -> Tensor:
    """y = x W + b with W = G_1 diag(D_1) G_2 ... G_d, contracted as told; CoMERA, section 4.2 (arXiv 2405.14377).

    Plain matrix products, so autograd, autocast, torch.compile and torch.export know what to do. Autograd goes back along the
    same contraction, which is as cheap as an order of its own (`LinearWork`), and keeps x, the formed parts and the rows
    between parts: with L and R nothing of size B x O but the output.

    Args:
        x: [..., I], I at most m_1...m_d.
        cores: (r, m, n, s) each, all input modes before all output modes.
        diagonals: (r) each, between neighbouring cores.
        out_features: O, at most n_1...n_d.
        bias: [O], or None.
        contraction: from `best_contractions`; any gives the same numbers.
        float8: whether every product of two matrices is a `float8_matmul`; y is bfloat16 then.

    Returns:
        [..., O].
    """
    batch, in_features = math.prod(x.shape[:-1]), x.shape[-1]
    matmul = float8_matmul if float8 else _matmul
    parts, between = _formed(cores, diagonals, contraction, matmul)
    height, rest, width = batch, math.prod([part.shape[1] for part in parts]), 1
    rows = x if x.dim() == 2 else x.reshape(batch, in_features)
    # Padding is left out of the train where one part holds all of it, and added to the rows or cut from them elsewhere.
    if parts[0].shape[1] == rest:
        parts[0], rest = parts[0][:, :in_features], in_features
    elif rest > in_features:
        rows = F.pad(rows, (0, rest - in_features))
    at_once = math.prod([part.shape[2] for part in parts[:-1]]) == 1
    if at_once:
        parts[-1] = parts[-1][:, :, :out_features]
    for part_rmns, diagonal in zip(parts, between, strict=True):
        r, m, n, s = part_rmns.shape
        if diagonal is not None:
            rows = rows.reshape(height * rest, r) * diagonal
        rest //= m
        if rest > 1 or (m > 1 and r > 1):
            rows = rows.reshape(height, m, rest, r).permute(0, 2, 3, 1)
        if rows.shape != (height * rest, r * m):  # even a view of the same shape costs a node of the graph
            rows = rows.reshape(height * rest, r * m)
        matrix = part_rmns.reshape(r * m, n * s)
        is_last = part_rmns is parts[-1]
        rows = matmul(rows, matrix, bias if is_last and at_once else None)
        height, width = height * n, width * n
    if not at_once:
        rows = rows.reshape(batch, width)[:, :out_features]
        rows = rows.contiguous() if bias is None else rows + bias.to(rows.dtype)  # as addmm under autocast
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], out_features)


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _formed(
    cores: Sequence[Tensor], diagonals: Sequence[Tensor], contraction: Contraction, matmul: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The parts, and before each the D_k that multiplies the rows; every other D_k is in the smaller of the cores beside it."""
    scaled, between = list(cores), []
    starts = {span(part)[0] for part in contraction.parts} if contraction.scale_rows else set()
    for k, diagonal in enumerate(diagonals, start=1):
        if k in starts:
            continue
        if scaled[k - 1].numel() <= scaled[k].numel():
            scaled[k - 1] = scaled[k - 1] * diagonal
        else:
            scaled[k] = diagonal.view(-1, 1, 1, 1) * scaled[k]
    for part in contraction.parts:
        first = span(part)[0]
        between.append(diagonals[first - 1] if contraction.scale_rows and first else None)
    return [_joined(scaled, part, matmul) for part in contraction.parts], between


def _joined(cores: Sequence[Tensor], tree: Tree, matmul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return cores[tree] if isinstance(tree, int) else contract([_joined(cores, branch, matmul) for branch in tree], matmul)
