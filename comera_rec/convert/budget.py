"""Dense matrices to tensor trains within one budget, ranks spread over all of them by their singular values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from comera_rec.rank import within_budget
from comera_rec.tt import TTShape, max_ranks, tt_svd_spectra


def tt_svd_within_budget(
    weights: Sequence[Tensor],
    shapes: Sequence[TTShape],
    budget_params: int,
    importance: Sequence[Tensor | None] | None = None,
) -> list[list[Tensor]]:
    """TT-SVD of several matrices, ranks chosen such that the parameters removed cost the least squared error.

    Every matrix is decomposed at more ranks than it can get; then the rank with the smallest squared singular value per parameter
    goes first, until all trains together fit. Their squared errors add up to at most the squares removed (Oseledets, Tensor-Train
    Decomposition, SIAM J. Sci. Comput. 2011, theorem 2.2).

    Args:
        weights: [M, N] each.
        shapes: modes of each; their ranks tell how many are tried: four times as many, and no less than 32.
        budget_params: the most parameters that all trains may take together, rank parameters included.
        importance: [M] each, what squared errors of a row count, averaged over the rows of one leading digit: how often it is
            read, or the sum of its squared gradients, which Adagrad keeps (the empirical Fisher information; Hsu et al., Language
            Model Compression with Weighted Low-Rank Factorization, ICLR 2022). Default: all alike.

    Returns:
        The cores of each matrix; a matrix that gets nothing has ranks of 0.
    """
    generous = [shape.with_ranks([min(max(32, 4 * r), most) for r, most in _bonds(shape)]) for shape in shapes]
    rows = importance or [None] * len(weights)
    found = [tt_svd_spectra(weight, shape, importance=each) for weight, shape, each in zip(weights, generous, rows, strict=True)]
    scores = [[singular.double().square() for singular in spectra] for _, spectra in found]
    masks = within_budget(generous, scores, budget_params, exact=False)
    return [_cut(cores, [int(mask.sum()) for mask in kept]) for (cores, _), kept in zip(found, masks, strict=True)]


def _bonds(shape: TTShape) -> list[tuple[int, int]]:
    return list(zip(shape.ranks, max_ranks(shape.row_shape, shape.col_shape), strict=True))


def _cut(cores: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    # Singular values descend, so the ranks that within_budget keeps are the leading ones.
    bonds = [1, *ranks, 1]
    return [core[:before, :, :, :after] for core, before, after in zip(cores, bonds[:-1], bonds[1:], strict=True)]
