"""The order of products for a layer and a batch: work agrees with torch's count, and the choice is compared with all others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from comera_rec.ops import tt_linear
from comera_rec.tt import (
    TTShape,
    best_contractions,
    candidate_contractions,
    contraction_for,
    span,
)
from comera_rec.tt.contraction import CALL, LAYER, NUMBER, contraction_cost

SHAPES = [
    TTShape.for_linear(1024, 512, tt_ranks=16, order=2),
    TTShape.for_linear(1024, 512, tt_ranks=16),
    TTShape.for_linear(4096, 4096, tt_ranks=128),
    TTShape.for_linear(768, 3072, tt_ranks=30, order=6),
    TTShape.for_linear(512, 512, tt_ranks=10**6, order=4),
]


class OperatorCounter(TorchDispatchMode):
    """Counts products, copies and scalings, and the numbers that they read and write; a scaling's diagonal isn't counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.clone.default):
            self.calls += 1
            self.numbers += out.numel()
            self.numbers += sum(x.numel() for x in args) if func is torch.ops.aten.mm.default else out.numel()
        return out


@pytest.mark.parametrize("order", [2, 4, 6])
def test_work_is_what_torch_does(order: int) -> None:
    shape = TTShape.for_linear(64, 64, tt_ranks=8, order=order)  # all sizes are multiples of a vector's
    shape = TTShape([max(m, 8) if m > 1 else 1 for m in shape.row_shape], [max(n, 8) if n > 1 else 1 for n in shape.col_shape], 8)
    cores = [torch.zeros(size) for size in shape.core_shapes]
    diagonals = [torch.zeros(rank) for rank in shape.ranks]
    for contraction in candidate_contractions(shape):
        with FlopCounterMode(display=False) as flops, OperatorCounter() as operators:
            tt_linear(torch.zeros(24, shape.num_rows), cores, diagonals, shape.num_cols, None, contraction)
        cost = flops.get_total_flops() // 2 + NUMBER * operators.numbers + CALL * operators.calls
        assert contraction_cost(shape, contraction, 24) == LAYER + cost


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_choice_is_within_a_tenth_of_the_cheapest(shape: TTShape) -> None:
    contractions = best_contractions(shape)
    assert contractions[-1][0] == math.inf
    for batch in (2**k for k in range(21)):
        chosen = contraction_cost(shape, contraction_for(contractions, batch), batch)
        cheapest = min(contraction_cost(shape, each, batch) for each in candidate_contractions(shape))
        assert chosen <= cheapest / 0.9


def test_forms_of_known_cases() -> None:
    large, full = TTShape.for_linear(4096, 4096, tt_ranks=128), TTShape.for_linear(512, 512, tt_ranks=10**6)
    for shape, batch, parts in (
        (large, 0, (0, 1, 2, 3)),  # one core after the other
        (large, 16_384, ((0, 1), (2, 3))),  # L and R
        (TTShape.for_linear(1000, 1000, tt_ranks=64, order=6), 16_384, (((0, 1), 2), (3, (4, 5)))),  # 4 and 5 have no rank beyond
    ):
        assert contraction_for(best_contractions(shape), batch).parts == parts
    (whole,) = contraction_for(best_contractions(full), 16_384).parts
    assert span(whole) == (0, 4), "the dense matrix"
