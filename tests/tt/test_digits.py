"""Mixed-radix digits by index arithmetic, for ids of any size."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from comera_rec.tt import factorize, row_digits


@given(
    num_rows=st.sampled_from([1, 2, 97, 10_007, 2**31 - 1, 3 * 10**9 + 19, 10**12 + 39]), order=st.integers(1, 4), data=st.data()
)
def test_digits_round_trip(num_rows: int, order: int, data: st.DataObject) -> None:
    radices = factorize(num_rows, order)
    drawn = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=8))
    rows = torch.tensor([0, num_rows - 1, math.prod(radices) - 1, *drawn])
    digits = row_digits(rows, radices)
    assert len(digits) == order
    for digit, radix in zip(digits, radices, strict=True):
        assert digit.dtype == torch.int64
        assert int(digit.min()) >= 0
        assert int(digit.max()) < radix
    weights = [math.prod(radices[k + 1 :]) for k in range(order)]
    assert torch.equal(sum(digit * weight for digit, weight in zip(digits, weights, strict=True)), rows)
