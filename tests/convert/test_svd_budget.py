"""TT-SVD of several matrices within one budget: the budget is kept, and the error is that of the best choice of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from comera_rec import TTEmbeddingBag, TTShape
from comera_rec.convert import fit_tables_
from comera_rec.tt import tt_svd, tt_to_dense

SHAPES = [TTShape((12, 10), (4, 4), 6), TTShape((15, 8), (4, 4), 6), TTShape((10, 9), (4, 4), 6)]


def matrices() -> list[Tensor]:
    """Matrices whose spectra fall slowly, fast, and at a tenth of the scale."""
    actual = []
    for shape, decay, scale in zip(SHAPES, (-0.5, -2.0, -0.5), (1.0, 1.0, 0.1), strict=True):
        sides = [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
        bases = [torch.linalg.qr(torch.randn(side, 30, dtype=torch.float64)).Q for side in sides]
        unfolded = scale * (bases[0] * torch.arange(1.0, 31) ** decay) @ bases[1].mT
        modes = unfolded.reshape(shape.row_shape[0], 4, shape.row_shape[1], 4).transpose(1, 2)
        actual.append(modes.reshape(shape.num_rows, shape.num_cols))
    return actual


def fit(
    weights: list[Tensor],
    shapes: list[TTShape],
    budget: int,
    importance: list[Tensor | None] | None = None,
    hot_rows: tuple[tuple[int, int], ...] = (),
) -> list[TTEmbeddingBag]:
    """Fit tables of these shapes to the weights within the budget."""
    tables = [TTEmbeddingBag(*w.shape, shape=s, hot_rows=hot_rows, dtype=w.dtype) for w, s in zip(weights, shapes, strict=True)]
    fit_tables_(tables, weights, budget, importance)
    return [table.requires_grad_(False) for table in tables]


def squared_error(weight: Tensor, shape: TTShape, cores: list[Tensor]) -> float:
    dense = tt_to_dense(cores, shape.with_ranks([core.shape[-1] for core in cores[:-1]]))
    return float((dense - weight).square().sum())


def test_no_other_ranks_are_better_by_more_than_the_last_rank() -> None:
    weights, budget = matrices(), 1400
    tables = fit(weights, SHAPES, budget)
    actual = [table.shape.ranks[0] for table in tables]
    size = sum(shape.with_ranks([rank]).num_params for shape, rank in zip(SHAPES, actual, strict=True))
    assert 0.9 * budget <= size <= budget
    assert actual[0] > actual[1] >= actual[2] > 0, "a table without ranks could never be trained again"
    error = sum(float((table.dense_matrix() - weight).square().sum()) for table, weight in zip(tables, weights, strict=True))
    table = [
        [squared_error(w, s, tt_svd(w, s.with_ranks([r]))) for r in range(1, 17)] for w, s in zip(weights, SHAPES, strict=True)
    ]
    best = min(
        sum(errors[r - 1] for errors, r in zip(table, ranks, strict=True))
        for ranks in itertools.product(range(1, 17), repeat=3)
        if sum(s.with_ranks([r]).num_params for s, r in zip(SHAPES, ranks, strict=True)) <= budget
    )
    assert error <= 1.05 * best


@pytest.mark.parametrize("order", [3, 4])
def test_errors_of_higher_orders_are_at_most_the_sum_of_the_truncations(order: int) -> None:
    shape = TTShape.for_table(120, 16, tt_ranks=6, order=order)
    weight = torch.randn(120, 16, dtype=torch.float64)
    (full,) = fit([weight], [shape.with_ranks(16)], 10**9)
    (cut,) = fit([weight], [shape.with_ranks(16)], 400)
    errors = [float((table.dense_matrix() - weight).norm()) for table in (full, cut)]
    assert cut.shape.num_params <= 400 < full.shape.num_params
    assert errors[0] < errors[1] <= float(weight.norm())


def weighted_error(table: TTEmbeddingBag, weight: Tensor, importance: Tensor) -> float:
    return float((importance[:, None] * (table.dense_matrix() - weight).square()).sum())


def test_hot_rows_and_ranks_share_a_budget() -> None:
    """A sum of a TT table and narrow hot rows is recovered by a table with hot rows, and not without them."""
    shape, frequency = TTShape((20, 20), (4, 4), 3), 1.0 / torch.arange(1, 401, dtype=torch.float64)
    cores = [torch.randn(size, dtype=torch.float64) for size in shape.core_shapes]
    weight = tt_to_dense(cores, shape)
    weight[:60] += 3 * torch.randn(60, 2, dtype=torch.float64) @ torch.randn(2, 16, dtype=torch.float64)
    budget = shape.num_params + 60 * 2 + 2 * 16 + 2
    (with_rows,) = fit([weight], [shape], budget, [frequency], ((60, 2),))
    (without_rows,) = fit([weight], [shape], budget, [frequency])
    (block,) = with_rows.hot_blocks()
    assert with_rows.shape.num_params + block.shape.num_params <= budget
    assert min(with_rows.shape.ranks, block.shape.ranks) > (0,)
    assert weighted_error(with_rows, weight, frequency) < 0.2 * weighted_error(without_rows, weight, frequency)


def test_blocks_that_save_little_lose_their_columns() -> None:
    weight, frequency = torch.randn(300, 16), torch.ones(300)
    frequency[:20] = 1e4
    (table,) = fit([weight], [TTShape((20, 15), (4, 4), 4)], 700, [frequency], ((20, 8), (100, 8)))
    hot, rare = table.hot_blocks()
    assert sum(module.shape.num_params for module in (table, hot, rare)) <= 700
    assert hot.shape.ranks[0] >= 10 > 1 >= rare.shape.ranks[0]
    error = (table.dense_matrix() - weight).square().sum(dim=1)
    assert error[:20].mean() < 0.2 * error[20:].mean()
