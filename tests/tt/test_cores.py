"""Initialization matched to a dense table's standard deviation, and contraction to the dense matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from comera_rec.tt import TTShape, init_cores_, tt_to_dense


def mean_square(cores: list[Tensor]) -> float:
    """Mean square of all dense entries, by contracting the cores with themselves instead of forming a billion entries."""
    gram = torch.ones(1, 1)
    for core in cores:
        gram = torch.einsum("ab,amnc,bmnd->cd", gram, core, core) / (core.shape[1] * core.shape[2])
    return float(gram)


@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_dense_entries_have_the_requested_standard_deviation(order: int, ranks: int) -> None:
    shape = TTShape.for_table(10_000_000, 64, tt_ranks=ranks, order=order)
    # Entries that share slices are dependent, so one draw is noisy: over 100 draws, 3 % is at least four standard errors.
    draws = []
    for _ in range(3 if order == 2 else 100):
        cores = [torch.empty(size) for size in shape.core_shapes]
        init_cores_(cores, shape, 0.02)
        draws.append(mean_square(cores))
    assert (sum(draws) / len(draws)) ** 0.5 == pytest.approx(0.02, rel=0.03)


def test_dense_entries_have_mean_zero_and_vanished_cores_stay() -> None:
    for shape in (TTShape.for_table(10_000, 16, tt_ranks=8), TTShape((3, 4), (2, 2), (0,))):
        cores = [torch.empty(size) for size in shape.core_shapes]
        init_cores_(cores, shape, 1.0)
        assert abs(float(tt_to_dense(cores, shape).mean())) < 0.02


def test_uninitialized_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tt_to_dense_is_the_sum_over_paths(order: int) -> None:
    row_shape, col_shape, ranks = (3, 2, 4, 2)[:order], (2, 3, 1, 2)[:order], (2, 3, 2)[: order - 1]
    shape = TTShape(row_shape, col_shape, ranks)
    cores = [torch.randn(size, dtype=torch.float64) for size in shape.core_shapes]
    dense = tt_to_dense(cores, shape)
    assert dense.shape == (shape.num_rows, shape.num_cols)
    for i, row in enumerate(itertools.product(*map(range, row_shape))):
        for j, column in enumerate(itertools.product(*map(range, col_shape))):
            product = torch.eye(1, dtype=torch.float64)
            for core, row_digit, column_digit in zip(cores, row, column, strict=True):
                product = product @ core[:, row_digit, column_digit, :]
            torch.testing.assert_close(dense[i, j], product[0, 0])


def test_tt_to_dense_refuses_cores_of_other_shapes() -> None:
    shape = TTShape((3, 4), (2, 2), 2)
    with pytest.raises(ValueError, match=r"cores have shapes .* but the TTShape states \[\(1, 3, 2, 2\), \(2, 4, 2, 1\)\]"):
        tt_to_dense([torch.zeros(1, 3, 2, 1), torch.zeros(1, 4, 2, 1)], shape)
