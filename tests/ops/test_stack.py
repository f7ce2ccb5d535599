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
    left, right = max(len(core) for core in cores), max(core.shape[3] for core in cores)
    stacked = []
    for diagonal, core in zip(diagonals, cores, strict=True):
        padded = core.new_zeros(core.shape[1], left, core.shape[2], right)
        padded[:, : len(core), :, : core.shape[3]] = torch.einsum("x,ximy->ixmy", diagonal, core)
        stacked.append(padded)
    return torch.cat(stacked)


def operands(
    lefts: Sequence[int], row_modes: Sequence[int], col_mode: int, rights: Sequence[int], scaled: bool
) -> tuple[list[Tensor], list[Tensor]]:
    cores = [torch.randn(left, m, col_mode, right) for left, m, right in zip(lefts, row_modes, rights, strict=True)]
    return cores, [torch.randn(left) for left in lefts] if scaled else []


def differentiate(function: Callable, cores: Sequence[Tensor], ranks: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    cores, ranks = ([tensor.detach().requires_grad_() for tensor in tensors] for tensors in (cores, ranks))
    out = function(cores, ranks)
    return [out.detach(), *torch.autograd.grad(out, [*cores, *ranks], grad)]


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    alike=st.booleans(),
    col_mode=st.integers(1, 5),
    scaled=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(
    sizes: list[tuple[int, int, int]],
    alike: bool,
    col_mode: int,
    scaled: bool,
    layouts: tuple,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Ranks that a table lacks are zeros; `alike` tables lack none."""
    torch.manual_seed(seed)
    lefts, row_modes, rights = zip(*[(sizes[0][0], m, sizes[0][2]) if alike else (r, m, s) for r, m, s in sizes], strict=True)
    cores, ranks = operands(lefts, row_modes, col_mode, rights, scaled)
    cores, ranks = [layouts[0](core.to(dtype)) for core in cores], [layouts[1](rank.to(dtype)) for rank in ranks]
    grad = layouts[2](torch.randn(sum(row_modes), max(lefts), col_mode, max(rights), dtype=dtype))
    found = differentiate(lambda *inputs: stack_cores(inputs[0], inputs[1] or None), cores, ranks, grad)
    expected = differentiate(composition, [x.double() for x in cores], [x.double() for x in ranks], grad.double())
    assert all(tensor.dtype == dtype for tensor in found)
    tolerance = {"atol": 0.2, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close([tensor.double() for tensor in found], expected, **tolerance)


def test_results_do_not_depend_on_the_number_of_threads(on_threads: Callable) -> None:
    cores, ranks = operands((16, 9, 16, 1), (100, 3, 250, 1), 4, (8, 8, 5, 2), scaled=True)
    grad = torch.randn(354, 16, 4, 8)
    one, two = (on_threads(count, lambda: differentiate(stack_cores, cores, ranks, grad)) for count in (1, 2))
    assert all(map(torch.equal, one, two))


def test_a_second_derivative_is_refused() -> None:
    core = torch.randn(2, 3, 2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(stack_cores([core]).square().sum(), core, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
