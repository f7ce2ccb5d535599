"""Approximation of dense matrices by TT tables within a budget, which goes to the ranks and hot rows that reduce the error most."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from comera_rec.nn import TTTable
from comera_rec.rank import within_budget
from comera_rec.tt import TTShape, first_rows, max_ranks, tt_svd_spectra

_ROUNDS = (4.0, 2.0, 1.4)
"""Multiples of the budget to which tables with hot rows shrink in turn; cores and blocks are fitted again at each."""


def fit_tables_(
    tables: Sequence[TTTable],
    weights: Sequence[Tensor],
    budget_params: int | None = None,
    importance: Sequence[Tensor | None] | None = None,
) -> None:
    """Set tables to approximations of matrices, with ranks chosen greedily for little squared error within one budget.

    Every matrix is decomposed at more ranks than fit. Then ranks are removed by smallest squared singular value per parameter until
    all tables together fit; a table's last rank goes only if nothing else is left. The squared errors sum to at most the squares
    removed (Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 2011, theorem 2.2).

    Columns of hot rows are treated as ranks: a block's singular values are those of its rows, each scaled by the root of its
    importance. Cores and blocks are fitted in turns, each to the residual of the others, while the size shrinks to the budget.

    Args:
        tables: the tables to set; with a budget, up to four times their ranks and widths are tried, and at least 32 ranks.
        weights: [M, N] each, the rows of ids.
        budget_params: the most parameters that all tables together may take; None keeps the ranks and widths.
        importance: [M] each, weights of the rows' squared errors: how often a row is read, or the sum of squared gradients that
            Adagrad keeps (the empirical Fisher information; Hsu et al., Language Model Compression with Weighted Low-Rank
            Factorization, ICLR 2022). For cores it is averaged over the rows of a leading digit. Default: equal.
    """
    importances = importance or [None] * len(tables)
    fits = [_Fit(*each, budget_params) for each in zip(tables, weights, importances, strict=True)]
    has_hot_rows = any(table.num_hot_rows for table in tables)
    for factor in (*_ROUNDS, 1.0) if has_hot_rows else (1.0,):
        for fit in fits:
            fit.solve()
        if budget_params is None:
            continue
        shapes = [shape for fit in fits for shape in fit.shapes]
        scores = [scores for fit in fits for scores in fit.scores]
        lasting = [k == 0 for fit in fits for k in range(len(fit.shapes))]  # cores of rank 0 could never be trained again
        masks = iter(within_budget(shapes, scores, int(factor * budget_params), lasting=lasting, exact=False))
        for fit in fits:
            fit.cut([[int(mask.sum()) for mask in next(masks)] for _ in fit.shapes])
    for fit in fits:
        fit.solve(is_cut=budget_params is not None)
        fit.store_()


class _Fit:
    """Cores and blocks of hot rows of one table, fitted to its matrix.

    Attributes:
        shapes: shape of the cores, then of each block.
        scores: squared singular values [r_k], per shape and bond.
        cores: cores, per shape.
    """

    def __init__(self, table: TTTable, weight: Tensor, importance: Tensor | None, budget_params: int | None) -> None:
        self.table, self.weight = table, table.by_row(weight.detach())
        self.importance = None if importance is None else table.by_row(importance)
        self.hot = self.weight[: table.num_hot_rows].to(torch.promote_types(weight.dtype, torch.float32))  # blocks exceed halves
        self.spans = [slice(block.first, block.first + block.num_rows) for block in table.hot_blocks()]
        shape, blocks = table.shape, [block.shape for block in table.hot_blocks()]
        self.shapes = [shape, *blocks]
        if budget_params is not None:
            tried = [max(32, 4 * r) for r in shape.ranks]
            if shape.order == 2 and not blocks:  # the budget pays for half of these; the others make random subspaces accurate
                tried = [min(*tried, max(32, 2 * budget_params // shape.with_ranks([1]).num_params))]
            self.shapes = [_with_ranks(shape, tried)]
            self.shapes += [_with_ranks(block, [4 * r for r in block.ranks]) for block in blocks]
        self.scores: list[list[Tensor]] = []
        self.cores: list[list[Tensor]] = []

    def solve(self, *, is_cut: bool = False) -> None:
        """Fit the blocks to the residual of the cores, then the cores to that of the blocks, at the present ranks."""
        if self.cores and not self.spans and not (is_cut and self.shapes[0].order > 2):
            return  # without blocks the first fit is final; only at higher orders, another one at the ranks that are left is better
        hot_residual = self.hot
        if len(self.hot) and self.cores:
            hot_residual = self.hot - first_rows(self.cores[0], self.table.shape.row_shape, *self.hot.shape)
        blocks = [self._block(hot_residual[span], shape, span) for span, shape in zip(self.spans, self.shapes[1:], strict=True)]
        residual = self.weight
        if len(self.hot):
            residual = self.weight.clone()
            for span, ((rows, projection), _) in zip(self.spans, blocks, strict=True):
                residual[span] -= rows[0, :, 0] @ projection[:, 0, :, 0]
        cores, spectra = tt_svd_spectra(residual, self.shapes[0], importance=self.importance)
        self.cores = [_cut(cores, self.shapes[0].ranks), *(cores for cores, _ in blocks)]
        self.scores = [[singular.double().square() for singular in spectra], *([squares] for _, squares in blocks)]

    def _block(self, target: Tensor, shape: TTShape, span: slice) -> tuple[list[Tensor], Tensor]:
        """Fit a block of rows to a target; return its cores and squared singular values."""
        scale = target.new_ones(len(target), dtype=torch.float64) if self.importance is None else self.importance[span].double()
        scale = scale.clamp_min(1e-3 * float(scale.mean())).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        squares, rotation = torch.linalg.eigh((scaled := target.double() * scale[:, None]).mT @ scaled)
        (rank,) = shape.ranks
        squares, rotation = squares.flip(0)[:rank].clamp_min(0), rotation.flip(1)[:, :rank]
        projected = (target.double() @ rotation).to(target.dtype)
        return [projected.view(1, len(target), 1, rank), rotation.mT.to(target.dtype).reshape(rank, 1, target.shape[1], 1)], squares

    def cut(self, ranks: Sequence[Sequence[int]]) -> None:
        """Keep the given numbers of leading ranks, which have the largest singular values, per shape and bond."""
        self.shapes = [shape.with_ranks(kept) for shape, kept in zip(self.shapes, ranks, strict=True)]
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


def row_importance(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the importance of each table's rows: the sums of squared gradients that row-wise Adagrad keeps.

    Args:
        state: an optimizer's state dict as TorchRec's fused tables write it, sharded (`TABLE.momentum1` of
            `....embedding_bags.TABLE.weight`) or not (`momentum_1`); nested, or with names joined by dots as in a distributed
            checkpoint.

    Returns:
        [M] by table name; tables without such sums, and those of one name, are left out.
    """
    found: dict[str, list[Tensor]] = {}
    for name, value in flatten_state_dict(dict(state))[0].items():
        table = re.search(r"(?:^|\.)([^.]+)\.weight\.(?:.*\.)?momentum_?1$", name)
        if table and isinstance(value, Tensor) and value.dim() == 1:
            found.setdefault(table[1], []).append(value)
    return {table: values[0] for table, values in found.items() if len(values) == 1}
