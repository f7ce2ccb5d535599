"""Dense matrix to tensor train by sequential singular value decompositions (TT-SVD)."""

from __future__ import annotations

import torch
from torch import Tensor

from comera_rec.tt.shape import TTShape

_EXACT_LIMIT = 1024  # an unfolding whose short side is longer than this is decomposed by randomized SVD
_OVERSAMPLING = 16


def tt_svd(weight: Tensor, shape: TTShape, *, rtol: float = 0.0) -> list[Tensor]:
    """Approximate a matrix by a tensor train of at most the given ranks.

    Unfold, keep the leading singular vectors as a core, go on with the rest; the error in the Frobenius norm is at most sqrt(d-1)
    times that of the best train of the same ranks. Oseledets, Tensor-Train Decomposition (SIAM J. Sci. Comput. 2011), algorithm 1;
    large unfoldings by randomized SVD, Halko, Martinsson and Tropp (SIAM Review 2011), algorithm 5.1.

    Args:
        weight: [M, N] with M <= shape.num_rows and N <= shape.num_cols; padded with zeros.
        shape: modes and the largest ranks.
        rtol: relative error in the Frobenius norm that may be traded for smaller ranks; 0 keeps the ranks of `shape`.

    Returns:
        d cores; core k has shape (r_{k-1}, m_k, n_k, r_k) with r_k <= shape.ranks[k-1], at least 1. All but the last are
        left-orthogonal.

    Raises:
        ValueError: if the matrix does not fit, or `rtol` is negative.
    """
    if weight.dim() != 2 or weight.shape[0] > shape.num_rows or weight.shape[1] > shape.num_cols:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} does not fit a train of {shape.num_rows} x {shape.num_cols}: enlarge the modes"
        )
    if not rtol >= 0:
        raise ValueError(f"rtol is {rtol}: give a non-negative number")
    d = shape.order
    dtype = weight.dtype
    work = weight.detach().to(torch.promote_types(dtype, torch.float32))
    work = torch.nn.functional.pad(work, (0, shape.num_cols - weight.shape[1], 0, shape.num_rows - weight.shape[0]))
    # (m_1..m_d, n_1..n_d) -> (m_1, n_1, m_2, n_2, ...): neighbouring row and column modes share a core.
    work = work.reshape(*shape.row_shape, *shape.col_shape).permute([axis for k in range(d) for axis in (k, d + k)])
    tolerance = rtol / max(1, d - 1) ** 0.5 * work.norm()
    cores, rank = [], 1
    for k in range(d - 1):
        size = shape.row_shape[k] * shape.col_shape[k]
        cap = max(1, shape.ranks[k])
        left, singular, right = _leading_svd(work.reshape(rank * size, -1), cap)
        kept = min(cap, left.shape[1])
        if rtol > 0:
            tail = singular.flip(0).square().cumsum(0).sqrt().flip(0)  # tail[j]: norm of what is lost by keeping j
            kept = max(1, min(kept, int((tail > tolerance).sum())))
        # Zero columns keep the asked rank where the unfolding has fewer singular vectors.
        missing = 0 if rtol > 0 else cap - kept
        left = torch.nn.functional.pad(left[:, :kept], (0, missing))
        work = torch.nn.functional.pad(singular[:kept, None] * right[:kept], (0, 0, 0, missing))
        cores.append(left.reshape(rank, shape.row_shape[k], shape.col_shape[k], -1).to(dtype))
        rank = left.shape[1]
    cores.append(work.reshape(rank, shape.row_shape[-1], shape.col_shape[-1], 1).to(dtype))
    return cores


def _leading_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """At least the leading `rank` singular triplets (U, S, V^T), S followed by the norm of the rest where that was not computed."""
    short_side = min(matrix.shape)
    if short_side <= _EXACT_LIMIT or rank + _OVERSAMPLING >= short_side:
        return torch.linalg.svd(matrix, full_matrices=False)
    left, singular, right = torch.svd_lowrank(matrix, q=rank + _OVERSAMPLING, niter=4)
    rest = (matrix.norm().square() - singular.square().sum()).clamp_min(0).sqrt()
    return left, torch.cat([singular, rest[None]]), right.mT
