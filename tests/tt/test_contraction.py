"""The order of products for a layer and a batch: work agrees with torch's count, and the choice is compared with all others."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera_rec.ops import tt_linear
from comera_rec.tt import (
    TTShape,
    best_contractions,
    candidate_contractions,
    contraction_for,
    contraction_work,
    dense_milliseconds,
    span,
    tt_milliseconds,
)
from comera_rec.tt.linear_cost import nanoseconds

SHAPES = [
    TTShape.for_linear(1024, 512, tt_ranks=16, order=2),
    TTShape.for_linear(1024, 512, tt_ranks=16),
    TTShape.for_linear(4096, 4096, tt_ranks=128),
    TTShape.for_linear(768, 3072, tt_ranks=30, order=6),
    TTShape.for_linear(512, 512, tt_ranks=10**6, order=4),
]


@pytest.mark.parametrize("order", [2, 4, 6])
def test_multiplies_are_those_that_torch_counts(order: int) -> None:
    shape = TTShape.for_linear(64, 64, tt_ranks=8, order=order)  # all sizes are multiples of a vector's
    shape = TTShape([max(m, 8) if m > 1 else 1 for m in shape.row_shape], [max(n, 8) if n > 1 else 1 for n in shape.col_shape], 8)
    cores = [torch.zeros(size) for size in shape.core_shapes]
    diagonals = [torch.zeros(rank) for rank in shape.ranks]
    for contraction in candidate_contractions(shape):
        with FlopCounterMode(display=False) as counter:
            tt_linear(torch.zeros(24, shape.num_rows), cores, diagonals, shape.num_cols, None, contraction)
        assert 2 * contraction_work(shape, contraction, 24).multiplies == counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_choice_is_within_a_tenth_of_the_cheapest(shape: TTShape) -> None:
    contractions = best_contractions(shape)
    assert contractions[-1][0] == math.inf
    for batch in (2**k for k in range(21)):
        chosen = nanoseconds(contraction_work(shape, contraction_for(contractions, batch), batch))
        cheapest = min(nanoseconds(contraction_work(shape, each, batch)) for each in candidate_contractions(shape))
        assert chosen <= cheapest / 0.9


def test_small_batches_use_cores_one_by_one_and_large_ones_use_l_and_r() -> None:
    contractions = best_contractions(TTShape.for_linear(4096, 4096, tt_ranks=128))
    assert contraction_for(contractions, 0).parts == (0, 1, 2, 3)
    assert contraction_for(contractions, 16_384).parts == ((0, 1), (2, 3))


def test_cores_of_full_rank_are_contracted_to_the_dense_matrix() -> None:
    (whole,) = contraction_for(best_contractions(TTShape.for_linear(512, 512, tt_ranks=10**6)), 16_384).parts
    assert span(whole) == (0, 4)


def test_output_modes_are_joined_from_the_end_if_ranks_are_large() -> None:
    shape = TTShape.for_linear(1000, 1000, tt_ranks=64, order=6)
    _, right = contraction_for(best_contractions(shape), 16_384).parts
    assert right == (3, (4, 5))  # the product of the last two has no rank on the right


def test_predictions_grow_with_the_batch_and_name_the_faster_form() -> None:
    shape = TTShape.for_linear(1024, 1024, tt_ranks=64)
    batches = [2**k for k in range(15)]
    for predicted in (
        [tt_milliseconds(shape, batch) for batch in batches],
        [dense_milliseconds(1024, 1024, batch) for batch in batches],
    ):
        assert predicted == sorted(predicted)
    assert tt_milliseconds(shape, 16_384) < dense_milliseconds(1024, 1024, 16_384) / 3
    assert tt_milliseconds(TTShape.for_linear(1024, 1024, tt_ranks=600, order=2), 16_384) > dense_milliseconds(1024, 1024, 16_384)
