"""Stacked cores against the same in plain torch: values and the gradients of cores and diagonals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS
from torch import Tensor

from comera_rec.ops import stack_cores


def composition(cores: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
    diagonals = ranks or [torch.ones(len(core), dtype=core.dtype) for core in cores]
    return torch.cat([torch.einsum("x,ximy->ixmy", diagonal, core) for diagonal, core in zip(diagonals, cores, strict=True)])


def operands(left: int, row_modes: Sequence[int], col_mode: int, right: int, scaled: bool) -> tuple[list[Tensor], list[Tensor]]:
    cores = [torch.randn(left, m, col_mode, right) for m in row_modes]
    return cores, [torch.randn(left) for _ in row_modes] if scaled else []


def differentiate(function: Callable, cores: Sequence[Tensor], ranks: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    cores, ranks = ([tensor.detach().requires_grad_() for tensor in tensors] for tensors in (cores, ranks))
    out = function(cores, ranks)
    return [out.detach(), *torch.autograd.grad(out, [*cores, *ranks], grad)]


@settings(max_examples=100)
@given(
    left=st.integers(0, 5),
    row_modes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    col_mode=st.integers(1, 5),
    right=st.integers(0, 20),
    scaled=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(
    left: int, row_modes: list[int], col_mode: int, right: int, scaled: bool, layouts: tuple, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    cores, ranks = operands(left, row_modes, col_mode, right, scaled)
    cores, ranks = [layouts[0](core.to(dtype)) for core in cores], [layouts[1](rank.to(dtype)) for rank in ranks]
    grad = layouts[2](torch.randn(sum(row_modes), left, col_mode, right, dtype=dtype))
    found = differentiate(lambda *inputs: stack_cores(inputs[0], inputs[1] or None), cores, ranks, grad)
    expected = differentiate(composition, [x.double() for x in cores], [x.double() for x in ranks], grad.double())
    assert all(tensor.dtype == dtype for tensor in found)
    tolerance = {"atol": 0.2, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close([tensor.double() for tensor in found], expected, **tolerance)


def test_results_do_not_depend_on_the_number_of_threads(on_threads: Callable) -> None:
    cores, ranks = operands(16, (100, 3, 250, 1), 4, 8, scaled=True)
    grad = torch.randn(354, 16, 4, 8)
    one, two = (on_threads(count, lambda: differentiate(stack_cores, cores, ranks, grad)) for count in (1, 2))
    assert all(map(torch.equal, one, two))


def test_a_second_derivative_is_refused() -> None:
    core = torch.randn(2, 3, 2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(stack_cores([core]).square().sum(), core, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
