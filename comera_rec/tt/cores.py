"""Cores of a tensor-train matrix: random initialization and contraction to the dense matrix.

Shapes: core k is (r_{k-1}, m_k, n_k, r_k); r_0 = r_d = 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.tt.shape import TTShape
from data_pipeline.errors import UserError


def init_cores_(cores: Sequence[Tensor], shape: TTShape, std: float) -> None:
    """Fill cores with Gaussian numbers so that the entries of the dense matrix have mean 0 and standard deviation `std`.

    An entry is a sum of r_1...r_{d-1} products of d independent Gaussians, so its variance is s^{2d} r_1...r_{d-1} for cores of
    standard deviation s and rank parameters of 1. For `std` 0, only the last core is zero, so that it has a gradient.

    Args:
        cores: tensors of `shape.core_shapes`, overwritten.
        shape: modes and ranks.
        std: standard deviation of the dense entries.
    """
    paths = math.prod(shape.ranks)
    if paths == 0:
        return
    variance = std * std or 1.0
    core_std = (variance / paths) ** (1 / (2 * shape.order))
    with torch.no_grad():
        for core in cores:
            core.normal_(0.0, core_std)
        if not std:
            cores[-1].zero_()


def scaled_cores(cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> list[Tensor]:
    """Multiply the diagonals between cores into the smaller neighbor of each."""
    scaled = list(cores)
    for k, diagonal in enumerate(diagonals, start=1):
        if scaled[k - 1].numel() <= scaled[k].numel():
            scaled[k - 1] = scaled[k - 1] * diagonal.flatten()
        else:
            scaled[k] = diagonal.view(-1, 1, 1, 1) * scaled[k]
    return scaled


def contract(cores: Sequence[Tensor]) -> Tensor:
    """Contract neighboring cores into one of shape (r_first, m_1...m_d, n_1...n_d, r_last).

    Args:
        cores: core k is (r_{k-1}, m_k, n_k, r_k), with any rank parameters already multiplied in.
    """
    result = cores[0]
    for core in cores[1:]:
        r0, m, n, r1 = result.shape
        _, m2, n2, r2 = core.shape
        # A plain matrix product, because autocast knows matmul but not tensordot.
        joined = result.reshape(r0 * m * n, r1) @ core.reshape(r1, m2 * n2 * r2)
        if n > 1 and m2 > 1:
            joined = joined.reshape(r0, m, n, m2, n2, r2).transpose(2, 3)
        result = joined.reshape(r0, m * m2, n * n2, r2)
    return result


def first_rows(cores: Sequence[Tensor], row_shape: Sequence[int], count: int, num_cols: int) -> Tensor:
    """Return the first rows of the matrix that cores represent, [count, num_cols], contracting only the slices they need.

    Args:
        cores: of row modes `row_shape`, with any rank parameters already multiplied in.
        row_shape: (m_1..m_d).
        count, num_cols: rows and columns to return, at most those of the matrix.
    """
    first, *others = cores
    digits = -(-count // math.prod(row_shape[1:]))
    rows = contract([first[:, :digits], *others])
    return rows.reshape(digits * math.prod(row_shape[1:]), -1)[:count, :num_cols]


def tt_to_dense(cores: Sequence[Tensor], shape: TTShape) -> Tensor:
    """Contract cores to the dense matrix that they represent.

    E[i, j] = G_1[0, i_1, j_1, :] G_2[:, i_2, j_2, :] ... G_d[:, i_d, j_d, 0]

    Args:
        cores: d tensors of `shape.core_shapes`, with any rank parameters already multiplied in.
        shape: modes and ranks.

    Returns:
        [num_rows, num_cols]; the caller drops the rows and columns that are padding.

    Raises:
        ValueError: if the cores don't have the shapes of `shape.core_shapes`.
    """
    core_shapes = [tuple(core.shape) for core in cores]
    if core_shapes != list(shape.core_shapes):
        raise UserError(f"cores have shapes {core_shapes} but the TTShape states {list(shape.core_shapes)}: make the two agree")
    return contract(cores).reshape(shape.num_rows, shape.num_cols)
