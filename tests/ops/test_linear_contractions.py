"""tt_linear agrees with the dense matrix in every order of products: outputs and all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comera_rec.ops import tt_linear
from comera_rec.ops.tt_linear import reference
from comera_rec.tt import Contraction, TTShape, candidate_contractions


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

    def outcome(self, contraction: Contraction | None) -> list[Tensor]:
        """Output and gradients; those of the reference if `contraction` is None."""
        arguments = (self.x, self.cores, self.diagonals, self.out_features, self.bias)
        out = reference.tt_linear(*arguments) if contraction is None else tt_linear(*arguments, contraction)
        assert out.is_contiguous()
        leaves = [self.x, *self.cores, *self.diagonals, *([] if self.bias is None else [self.bias])]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.upstream)]


def assert_all_agree(layer: Layer, contractions: list[Contraction]) -> None:
    expected = layer.outcome(None)
    for contraction in contractions:
        for actual, exact in zip(layer.outcome(contraction), expected, strict=True):
            torch.testing.assert_close(actual, exact, msg=lambda text, c=contraction: f"{c}: {text}")


@pytest.mark.parametrize("order", [2, 3, 4, 5, 6, 8])
def test_every_contraction_equals_the_reference(order: int) -> None:
    rows, cols = (4, 3, 2, 2)[: order // 2], (2, 3, 2, 2)[: order - order // 2]
    shape = TTShape(rows + (1,) * len(cols), (1,) * len(rows) + cols, tuple(range(2, order + 1)))
    contractions = list(candidate_contractions(shape))
    assert len(contractions) == 2**order - 1  # every way to cut, with D at the cores and, if there are cuts, also on the rows
    layer = Layer(shape, (math.prod(rows) - 1, math.prod(cols) - 1), (5,), torch.float64, bias=True)
    assert_all_agree(layer, contractions)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, list[Contraction]]:
    modes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    rows, cols = tuple(draw(modes)), tuple(draw(modes))
    order = len(rows) + len(cols)
    ranks = draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 4), min_size=order - 1, max_size=order - 1))
    shape = TTShape(rows + (1,) * len(cols), (1,) * len(rows) + cols, ranks)
    features = draw(st.integers(1, math.prod(rows))), draw(st.integers(1, math.prod(cols)))
    leading = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    layer = Layer(shape, features, leading, draw(st.sampled_from([torch.float32, torch.float64])), draw(st.booleans()))
    candidates = list(candidate_contractions(shape))
    return layer, draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=3))


@settings(max_examples=150)
@given(layers())
def test_any_layer_any_batch(case: tuple[Layer, list[Contraction]]) -> None:
    assert_all_agree(*case)


@pytest.mark.parametrize("index", range(0, 15, 2))
def test_gradients_of_first_and_second_order(index: int) -> None:
    shape = TTShape((2, 2, 1, 1), (1, 1, 2, 2), 2)
    layer = Layer(shape, (3, 3), (2,), torch.float64, bias=True)
    contraction = list(candidate_contractions(shape))[index]

    def output(x: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        return tt_linear(x, rest[:4], rest[4:], 3, bias, contraction)

    assert layer.bias is not None
    leaves = (layer.x, layer.bias, *layer.cores, *layer.diagonals)
    assert torch.autograd.gradcheck(output, leaves)
    assert torch.autograd.gradgradcheck(output, leaves)
