"""Dense matrices to tensor-train tables within one budget: ranks, and widths of hot rows, spread by what they save of the error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.nn import TTTable
from comera_rec.rank import within_budget
from comera_rec.tt import TTShape, first_rows, max_ranks, tt_svd_spectra

_ROUNDS = (4.0, 2.0, 1.4)
"""Sizes, in budgets, on the way to tables with hot rows: at each what remains is fitted anew."""


def fit_tables_(
    tables: Sequence[TTTable], weights: Sequence[Tensor], budget_params: int, importance: Sequence[Tensor | None] | None = None
) -> None:
    """Set tables to approximations of matrices, sizes chosen such that the parameters removed cost the least squared error.

    Every matrix is decomposed at more ranks than it can get; then the rank with the smallest squared singular value per parameter
    goes first, until all tables together fit. Squared errors add up to at most the squares removed (Oseledets, Tensor-Train
    Decomposition, SIAM J. Sci. Comput. 2011, theorem 2.2).

    Columns of hot rows are ranks like others: a block's singular values are those of its rows, each times the root of its
    importance. Cores and blocks are fitted in turns to what the others leave, while the size falls to the budget in rounds.

    Args:
        tables: their ranks and widths tell how many are tried: four times as many, and no fewer than 32 ranks.
        weights: [M, N] each.
        budget_params: the most parameters that all tables together may take.
        importance: [M] each, what squared errors of a row count: how often it is read, or the sum of its squared gradients, which
            Adagrad keeps (the empirical Fisher information; Hsu et al., Language Model Compression with Weighted Low-Rank
            Factorization, ICLR 2022). Cores take it averaged over the rows of one leading digit. Default: all alike.
    """
    rows = importance or [None] * len(tables)
    fits = [_Fit(table, weight, each) for table, weight, each in zip(tables, weights, rows, strict=True)]
    has_hot_rows = any(table.num_hot_rows for table in tables)
    for factor in (*_ROUNDS, 1.0) if has_hot_rows else (1.0,):
        for fit in fits:
            fit.solve()
        shapes = [shape for fit in fits for shape in fit.shapes]
        scores = [scores for fit in fits for scores in fit.scores]
        masks = iter(within_budget(shapes, scores, int(factor * budget_params), exact=False))
        for fit in fits:
            fit.cut([[int(mask.sum()) for mask in next(masks)] for _ in fit.shapes])
    for fit in fits:
        fit.solve()
        fit.store_()


class _Fit:
    """A table's cores and blocks, as they approach a matrix.

    Attributes:
        shapes: of the cores, then of each block.
        scores: of each, per bond the squared singular values.
    """

    def __init__(self, table: TTTable, weight: Tensor, importance: Tensor | None) -> None:
        self.table, self.weight, self.importance = table, weight.detach(), importance
        self.hot = self.weight[: table.num_hot_rows]
        self.spans = [slice(block.first, block.first + block.num_rows) for block in table.hot_blocks()]
        shape, blocks = table.shape, [block.shape for block in table.hot_blocks()]
        self.shapes = [_with_ranks(shape, [max(32, 4 * r) for r in shape.ranks])]
        self.shapes += [_with_ranks(block, [4 * r for r in block.ranks]) for block in blocks]
        self.scores: list[list[Tensor]] = []
        self.cores: list[list[Tensor]] = []  # of each

    def solve(self) -> None:
        """Fit blocks to what the cores leave, then the cores to what blocks leave; ranks stay. Without blocks once is enough."""
        if self.cores and not self.spans:
            return
        rest = self.hot
        if len(rest) and self.cores:
            rest = rest - first_rows(self.cores[0], self.table.shape.row_shape, len(rest), rest.shape[1])
        blocks = [self._block(rest[span], shape, span) for span, shape in zip(self.spans, self.shapes[1:], strict=True)]
        residual = self.weight
        if len(rest):
            residual = self.weight.clone()
            for span, ((rows, projection), _) in zip(self.spans, blocks, strict=True):
                residual[span] -= rows[0, :, 0] @ projection[:, 0, :, 0]
        cores, spectra = tt_svd_spectra(residual, self.shapes[0], importance=self.importance)
        self.cores = [_cut(cores, self.shapes[0].ranks), *(cores for cores, _ in blocks)]
        self.scores = [[singular.double().square() for singular in spectra], *([squares] for _, squares in blocks)]

    def _block(self, rest: Tensor, shape: TTShape, span: slice) -> tuple[list[Tensor], Tensor]:
        """Cores of a block of rows, and its squared singular values."""
        scale = rest.new_ones(len(rest), dtype=torch.float64) if self.importance is None else self.importance[span].double()
        scale = scale.clamp_min(1e-3 * float(scale.mean())).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        squares, turn = torch.linalg.eigh((scaled := rest.double() * scale[:, None]).mT @ scaled)
        (rank,) = shape.ranks
        squares, turn = squares.flip(0)[:rank].clamp_min(0), turn.flip(1)[:, :rank]
        projected = (rest.double() @ turn).to(rest.dtype)
        return [projected.view(1, len(rest), 1, rank), turn.mT.to(rest.dtype).reshape(rank, 1, rest.shape[1], 1)], squares

    def cut(self, ranks: Sequence[Sequence[int]]) -> None:
        """Keep so many ranks of each bond; singular values descend, so they are the leading ones."""
        self.shapes = [shape.with_ranks(of_shape) for shape, of_shape in zip(self.shapes, ranks, strict=True)]
        self.cores = [_cut(cores, shape.ranks) for cores, shape in zip(self.cores, self.shapes, strict=True)]
        self.scores = [
            [score[:rank] for score, rank in zip(scores, shape.ranks, strict=True)]
            for scores, shape in zip(self.scores, self.shapes, strict=True)
        ]

    def store_(self) -> None:
        """Set the table's parameters."""
        for module, cores in zip((self.table, *self.table.hot_blocks()), self.cores, strict=True):
            module.set_cores_(cores)


def _with_ranks(shape: TTShape, ranks: Sequence[int]) -> TTShape:
    return shape.with_ranks(
        [min(rank, most) for rank, most in zip(ranks, max_ranks(shape.row_shape, shape.col_shape), strict=True)]
    )


def _cut(cores: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    bonds = [1, *ranks, 1]
    return [core[:before, :, :, :after] for core, before, after in zip(cores, bonds[:-1], bonds[1:], strict=True)]
