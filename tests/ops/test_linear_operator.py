"""tt_linear agrees with the dense matrix: outputs and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comera_rec.ops import tt_linear
from comera_rec.ops.tt_linear import reference
from comera_rec.tt import TTShape


class Layer:
    """Cores, diagonals, bias and input of a shape, positive so that no sum cancels; `features` may be smaller than the modes."""

    def __init__(self, shape: TTShape, features: tuple[int, int], leading: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
        def leaf(*size: int) -> Tensor:
            return torch.rand(*size, dtype=dtype).add_(0.5).requires_grad_()

        self.cores = [leaf(*size) for size in shape.core_shapes]
        self.diagonals = [leaf(rank) for rank in shape.ranks]
        self.bias = leaf(features[1]) if bias else None
        self.x = leaf(*leading, features[0])
        self.out_features = features[1]
        self.upstream = torch.rand(*leading, features[1], dtype=dtype)

    def outcome(self, function: Callable[..., Tensor], *more: int) -> list[Tensor]:
        """Output and gradients."""
        out = function(self.x, self.cores, self.diagonals, *more, self.out_features, self.bias)
        assert out.is_contiguous()
        leaves = [self.x, *self.cores, *self.diagonals, *([] if self.bias is None else [self.bias])]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.upstream)]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, int]:
    modes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    rows, cols = tuple(draw(modes)), tuple(draw(modes))
    order = len(rows) + len(cols)
    ranks = draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 4), min_size=order - 1, max_size=order - 1))
    shape = TTShape(rows + (1,) * len(cols), (1,) * len(rows) + cols, ranks)
    features = draw(st.integers(1, math.prod(rows))), draw(st.integers(1, math.prod(cols)))
    leading = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype, bias = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.booleans())
    return Layer(shape, features, leading, dtype, bias), len(rows)


@settings(max_examples=150)
@given(layers())
def test_any_layer_any_batch(case: tuple[Layer, int]) -> None:
    layer, inputs = case
    torch.testing.assert_close(layer.outcome(tt_linear, inputs), layer.outcome(reference.tt_linear))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_gradients_of_first_and_second_order(order: int) -> None:
    inputs = order // 2
    shape = TTShape((2,) * inputs + (1,) * (order - inputs), (1,) * inputs + (2,) * (order - inputs), 2)
    layer = Layer(shape, (shape.num_rows - 1, shape.num_cols - 1), (2,), torch.float64, bias=True)

    def output(x: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        return tt_linear(x, rest[:order], rest[order:], inputs, layer.out_features, bias)

    assert layer.bias is not None
    leaves = (layer.x, layer.bias, *layer.cores, *layer.diagonals)
    assert torch.autograd.gradcheck(output, leaves)
    assert torch.autograd.gradgradcheck(output, leaves)
