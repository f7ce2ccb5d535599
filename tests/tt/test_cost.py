"""The work of linear layers agrees with torch's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from comera_rec.ops import tt_linear
from comera_rec.tt import TTShape, tt_cost
from comera_rec.tt.cost import CALL, LAYER, NUMBER


class OperatorCounter(TorchDispatchMode):
    """Counts products and scalings, and the numbers that they read and write; a scaling's diagonal isn't counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor):
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
    with FlopCounterMode(display=False) as flops, OperatorCounter() as operators:
        tt_linear(torch.zeros(24, shape.num_rows), cores, diagonals, order // 2, shape.num_cols, None)
    assert tt_cost(shape, 24) == LAYER + flops.get_total_flops() // 2 + NUMBER * operators.numbers + CALL * operators.calls
