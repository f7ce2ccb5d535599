"""Decomposition of a dense matrix into TT cores by successive singular value decompositions (TT-SVD).

M rows, N columns; m_k, n_k modes; r_k ranks; the first unfolding A is (m_1 n_1) x (m_2..m_d n_2..n_d).
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.tt.shape import TTShape
from data_pipeline.errors import UserError

_EXACT_LIMIT = 1024  # an unfolding whose short side is longer than this is decomposed by randomized SVD
_WHOLE_LIMIT = 1 << 24  # a matrix of more entries than this is read in blocks, never copied
_BLOCK = 1 << 22  # entries of a block
_OVERSAMPLING = 16


def tt_svd(weight: Tensor, shape: TTShape, *, rtol: float = 0.0) -> list[Tensor]:
    """Approximate a matrix by cores of at most the given ranks.

    Each step unfolds the matrix, keeps the leading singular vectors as a core and decomposes the remainder; the error in the
    Frobenius norm is at most sqrt(d-1) times that of the best cores of the same ranks. Oseledets, Tensor-Train Decomposition (SIAM
    J. Sci. Comput. 2011), algorithm 1. Large unfoldings use randomized subspace iteration: Halko, Martinsson and Tropp (SIAM Review
    2011), algorithm 4.4. A large matrix is read in blocks of rows: besides it and the cores, memory holds only a small multiple of
    r_1 rows of the first unfolding.

    Args:
        weight: [M, N] with M <= shape.num_rows and N <= shape.num_cols; padded with zeros.
        shape: modes and the largest ranks.
        rtol: relative error in the Frobenius norm that may be traded for smaller ranks; 0 keeps the ranks of `shape`. Errors below
            1e-8 aren't told apart in large matrices.

    Returns:
        d cores; core k has shape (r_{k-1}, m_k, n_k, r_k) with r_k <= shape.ranks[k-1], at least 1. All but the last are
        left-orthogonal.

    Raises:
        ValueError: if the matrix does not fit, isn't of floating point or holds numbers that are not finite; for a negative `rtol`.
    """
    return [core.to(weight.dtype) for core in tt_svd_spectra(weight, shape, rtol=rtol)[0]]


def tt_svd_spectra(
    weight: Tensor, shape: TTShape, *, rtol: float = 0.0, importance: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the cores of `tt_svd`, of at least 32 bits, and for every bond the singular values [r_k] kept there, descending.

    Cutting bonds to their leading ranks raises the squared error by at most the sum of the squared singular values that are cut.

    Args:
        weight, shape, rtol: as for `tt_svd`.
        importance: [M] non-negative weights of the rows' squared errors; default equal. Only its means over the rows of a leading
            digit matter: with S their roots, S A is decomposed and the first core is divided by S.

    Raises:
        ValueError: as `tt_svd`.
    """
    if weight.dim() != 2 or weight.shape[0] > shape.num_rows or weight.shape[1] > shape.num_cols:
        raise UserError(
            f"weight of shape {tuple(weight.shape)} does not fit modes of {shape.num_rows} x {shape.num_cols}: enlarge them"
        )
    if not weight.is_floating_point():
        raise UserError(f"weight is {weight.dtype}: give a matrix of floating point")
    if not rtol >= 0:
        raise UserError(f"rtol is {rtol}: give a non-negative number")
    weight = weight.detach()
    scale, unit = (None, 1.0) if importance is None else _scale_of_digits(importance, shape)
    scale = None if scale is None else scale.to(weight.device)
    unfolding = _Unfolding(weight, shape, scale)
    norm = unfolding.norm()
    if not norm.isfinite():
        raise UserError("weight holds numbers that are not finite, or too large: give one without them")
    tolerance = rtol / max(1, shape.order - 1) ** 0.5 * norm
    cores, spectra, rank = [], [], 1
    remainder = torch.empty(0)
    for k in range(shape.order - 1):
        cap = max(1, shape.ranks[k])
        if k == 0 and unfolding.is_large(cap):
            left, singular, remainder = unfolding.leading_svd(cap)
        else:
            remainder = unfolding.whole() if k == 0 else remainder
            left, singular, remainder = _leading_svd(remainder.reshape(rank * shape.row_shape[k] * shape.col_shape[k], -1), cap)
        num_kept = min(cap, left.shape[1])
        if rtol > 0:
            tail = singular.flip(0).square().cumsum(0).sqrt().flip(0)  # tail[j]: norm of the error of keeping j
            num_kept = max(1, min(num_kept, int((tail > tolerance).sum())))
        # If the unfolding has fewer singular vectors than the rank, the core is padded with zero columns.
        missing = 0 if rtol > 0 else cap - num_kept
        left = F.pad(left[:, :num_kept], (0, missing))
        remainder = F.pad(remainder[:num_kept], (0, 0, 0, missing))
        cores.append(left.reshape(rank, shape.row_shape[k], shape.col_shape[k], -1))
        spectra.append(F.pad(unit * singular[:num_kept], (0, missing)))
        rank = left.shape[1]
    remainder = remainder if cores else unfolding.whole()
    cores.append(remainder.reshape(rank, shape.row_shape[-1], shape.col_shape[-1], 1))
    if scale is not None:
        cores[0] = (cores[0] / scale.view(1, -1, 1, 1)).to(unfolding.dtype)
    return cores, spectra


def _scale_of_digits(importance: Tensor, shape: TTShape) -> tuple[Tensor, float]:
    """Return [m_1], roots of each leading digit's importance, of at least 1e-3, over the mean of all; and that mean's root."""
    digit_rows = shape.num_rows // shape.row_shape[0]
    sums = torch.stack([part.double().sum() for part in importance.split(digit_rows)])
    means = F.pad(sums, (0, shape.row_shape[0] - len(sums))) / digit_rows
    mean = float(means.mean())
    return ((means / mean).clamp_min(1e-3).sqrt(), mean**0.5) if mean else (means + 1, 1.0)


class _Unfolding:
    """The first unfolding A of a matrix: rows are (i_1, j_1), columns (i_2, j_2, ..., i_d, j_d)."""

    def __init__(self, weight: Tensor, shape: TTShape, scale: Tensor | None = None) -> None:
        self.weight = weight
        self.shape = shape
        self.scale = scale  # [m_1], factor of the rows of each leading digit
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.rows = shape.row_shape[0] * shape.col_shape[0]
        self.columns = shape.num_rows * shape.num_cols // self.rows

    def is_large(self, rank: int) -> bool:
        """Return whether A is too large to copy or to decompose exactly, or its Gram matrix is faster and as exact."""
        short_side = min(self.rows, self.columns)
        if self.dtype == torch.float32 and self.rows <= min(_EXACT_LIMIT, self.columns // 8):
            return True
        return self.weight.numel() > _WHOLE_LIMIT or (short_side > _EXACT_LIMIT and rank + _OVERSAMPLING < short_side)

    def norm(self) -> Tensor:
        """Return the Frobenius norm of A."""
        return torch.stack([block.double().square().sum() for _, block in self._blocks()]).sum().sqrt()

    def whole(self) -> Tensor:
        """Return a copy of A."""
        return torch.cat([block for _, block in self._blocks(self.shape.row_shape[0])])

    def _blocks(self, digits: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, those rows of A) for a few leading digits at a time."""
        (m1, *m_rest), (n1, *n_rest) = self.shape.row_shape, self.shape.col_shape
        digit_rows, d = math.prod(m_rest), self.shape.order
        step = digits or max(1, _BLOCK // (digit_rows * self.shape.num_cols))
        for first in range(0, m1, step):
            last = min(first + step, m1)
            rows = self.weight[first * digit_rows : last * digit_rows].to(self.dtype)
            padding = (0, self.shape.num_cols - rows.shape[1], 0, (last - first) * digit_rows - rows.shape[0])
            block = F.pad(rows, padding).reshape(last - first, *m_rest, n1, *n_rest)
            # (i_1, i_2..i_d, j_1, j_2..j_d) -> (i_1, j_1, i_2, j_2, ...): neighboring row and column modes share a core.
            block = block.permute([axis for k in range(d) for axis in (k, d + k)])
            if self.scale is not None:
                block = block * self.scale[first:last].to(self.dtype).view(-1, *[1] * (2 * d - 1))
            yield slice(first * n1, last * n1), block.reshape((last - first) * n1, -1)

    def leading_svd(self, rank: int, iterations: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `_leading_svd` does, reading A in blocks."""
        # Squares of singular values, and the squared norm less their sum, need float64 throughout.
        if self.rows <= _EXACT_LIMIT:
            singular, left = _singular_values(self._gram())
            left = left[:, :rank].to(self.dtype)
            return left, singular.to(self.dtype), self._transposed_times(left).mT
        basis = self._random_basis(min(rank + _OVERSAMPLING, self.rows, self.columns), iterations)
        projected = self._transposed_times(basis).mT  # basis @ projected is A without the part that the basis misses
        singular, rotation = _singular_values(projected @ projected.mT)
        rest = (self.norm().square() - singular.square().sum()).clamp_min(0).sqrt()
        rotation = rotation[:, :rank]
        spectrum = torch.cat([singular, rest[None]]).to(self.dtype)
        return (basis @ rotation).to(self.dtype), spectrum, (rotation.mT @ projected).to(self.dtype)

    def _gram(self) -> Tensor:
        """Return A A^T in float64."""
        gram = self.weight.new_zeros(self.rows, self.rows, dtype=torch.float64)
        # Blocks of columns, because every row of A enters every entry of A A^T.
        for block in self._column_blocks():
            columns = block.double()
            gram.addmm_(columns, columns.mT)
        return gram

    def _column_blocks(self) -> Iterator[Tensor]:
        """Yield all rows of A for a few of its columns at a time, in an order that is valid only for forming A A^T."""
        (m1, *m_rest), n1 = self.shape.row_shape, self.shape.col_shape[0]
        digit_rows = math.prod(m_rest)
        step = max(1, _BLOCK // (m1 * self.shape.num_cols))
        starts = torch.arange(m1, device=self.weight.device) * digit_rows
        for first in range(0, digit_rows, step):
            ids = starts[:, None] + torch.arange(first, min(first + step, digit_rows), device=self.weight.device)
            rows = self.weight[ids.clamp_max(len(self.weight) - 1)].to(self.dtype) * (ids < len(self.weight))[..., None]
            block = F.pad(rows, (0, self.shape.num_cols - rows.shape[2])).reshape(m1, ids.shape[1], n1, -1)
            if self.scale is not None:
                block = block * self.scale.to(self.dtype).view(-1, 1, 1, 1)
            yield block.transpose(1, 2).reshape(self.rows, -1)

    def _random_basis(self, size: int, iterations: int) -> Tensor:
        """Return float64 orthonormal columns that nearly span the leading left singular vectors."""
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(self.columns, size, generator=generator).to(self.weight.device, torch.float64)
        for iteration in range(iterations + 1):
            if iteration:
                basis = torch.linalg.qr(self._transposed_times(basis)).Q
            basis = torch.linalg.qr(torch.cat([block.double() @ basis for _, block in self._blocks()])).Q
        return basis

    def _transposed_times(self, basis: Tensor) -> Tensor:
        """Return A^T basis in the basis's dtype."""
        result = basis.new_zeros(self.columns, basis.shape[1])
        for rows, block in self._blocks():
            result.addmm_(block.to(basis.dtype).mT, basis[rows])
        return result


def _leading_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return at least the leading `rank` of (U, S, S V^T); if not all are computed, a last entry of S is the norm of the rest."""
    short_side = min(matrix.shape)
    if short_side <= _EXACT_LIMIT or rank + _OVERSAMPLING >= short_side:
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        return left, singular, singular[:, None] * right
    # Iterations are cheap here; the first unfolding may be too large to be read as often.
    return _Unfolding(matrix, TTShape((len(matrix), 1), (1, matrix.shape[1]), 1)).leading_svd(rank, iterations=4)


def _singular_values(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular values of A, descending, and its left singular vectors as columns, from A A^T."""
    squares, vectors = torch.linalg.eigh(gram)
    return squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
