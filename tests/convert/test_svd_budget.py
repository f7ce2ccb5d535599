"""TT-SVD of several matrices within one budget: the budget holds, and the error is that of the best choice of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from comera_rec import TTShape, tt_svd, tt_svd_within_budget, tt_to_dense

SHAPES = [TTShape((12, 10), (4, 4), 6), TTShape((15, 8), (4, 4), 6), TTShape((10, 9), (4, 4), 6)]


def matrices() -> list[Tensor]:
    """Spectra that fall slowly, fast, and at a tenth of the scale."""
    found = []
    for shape, decay, scale in zip(SHAPES, (-0.5, -2.0, -0.5), (1.0, 1.0, 0.1), strict=True):
        sides = [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
        bases = [torch.linalg.qr(torch.randn(side, 30, dtype=torch.float64)).Q for side in sides]
        unfolded = scale * (bases[0] * torch.arange(1.0, 31) ** decay) @ bases[1].mT
        modes = unfolded.reshape(shape.row_shape[0], 4, shape.row_shape[1], 4).transpose(1, 2)
        found.append(modes.reshape(shape.num_rows, shape.num_cols))
    return found


def squared_error(weight: Tensor, shape: TTShape, cores: list[Tensor]) -> float:
    dense = tt_to_dense(cores, shape.with_ranks([core.shape[-1] for core in cores[:-1]]))
    return float((dense - weight).square().sum())


def test_no_other_ranks_are_better_by_more_than_the_last_rank() -> None:
    weights, budget = matrices(), 1400
    trains = tt_svd_within_budget(weights, SHAPES, budget)
    found = [cores[0].shape[-1] for cores in trains]
    size = sum(shape.with_ranks([rank]).num_params for shape, rank in zip(SHAPES, found, strict=True))
    assert 0.9 * budget <= size <= budget
    assert found[0] > found[1] > found[2]
    error = sum(map(squared_error, weights, SHAPES, trains))
    table = [
        [squared_error(w, s, tt_svd(w, s.with_ranks([r]))) if r else float(w.square().sum()) for r in range(17)]
        for w, s in zip(weights, SHAPES, strict=True)
    ]
    best = min(
        sum(errors[r] for errors, r in zip(table, ranks, strict=True))
        for ranks in itertools.product(range(17), repeat=3)
        if sum(s.with_ranks([r]).num_params for s, r in zip(SHAPES, ranks, strict=True)) <= budget
    )
    assert error <= 1.05 * best


@pytest.mark.parametrize("order", [3, 4])
def test_higher_orders_stay_within_the_sum_of_what_is_cut(order: int) -> None:
    shape = TTShape.for_table(120, 16, tt_ranks=6, order=order)
    weight = torch.randn(120, 16, dtype=torch.float64)
    (full,) = tt_svd_within_budget([weight], [shape.with_ranks(16)], 10**9)
    (cut,) = tt_svd_within_budget([weight], [shape.with_ranks(16)], 400)
    whole = shape.with_ranks([core.shape[-1] for core in full[:-1]])
    errors = []
    for cores in (full, cut):
        found = shape.with_ranks([core.shape[-1] for core in cores[:-1]])
        errors.append(float((tt_to_dense(cores, found)[:120, :16] - weight).norm()))
    assert sum(core.numel() for core in cut) <= 400 < whole.num_params
    assert errors[0] < errors[1] <= float(weight.norm())
