"""gathered_matmul agrees with its definition, output and gradients, for odd sizes and layouts, and obeys torch.library's rules."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, transposed, within
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comera_rec.ops import gathered_matmul
from comera_rec.ops.gathered_matmul import resolve_impl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
triton = pytest.param(
    "triton", marks=pytest.mark.skipif(not INTERPRETED, reason="test_triton_interpreter.py runs it in a process of its own")
)
every_impl = pytest.mark.parametrize("impl", ["reference", triton])

# P, Q slices; n1 x r times r x n2; U products
SIZES = [
    (5, 7, 3, 4, 2, 11),
    (1, 1, 1, 1, 1, 1),
    (13, 3, 5, 1, 7, 64),  # rank 1, primes, many repeats
    (200, 2, 8, 32, 8, 3),  # most slices unused
    (3, 4, 15, 40, 67, 9),  # all tile heights and numbers of vectors
    (1, 50, 2, 3, 2, 700),  # one long sum
    (4, 4, 2, 3, 5, 0),  # nothing looked up
    (4, 4, 2, 0, 5, 6),  # every rank truncated away
    (4, 4, 0, 3, 5, 6),
    (4, 4, 2, 3, 0, 6),
]


def operands(
    size: tuple[int, ...], dtype: torch.dtype = torch.float32, padding: float = 0.0, skew: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw a, b, the output's gradient, p and q; the higher `skew`, the more ids are zero."""
    slices_p, slices_q, n1, rank, n2, products = size
    a, b, grad = (torch.randn(shape, dtype=dtype) for shape in ((slices_p, n1, rank), (slices_q, rank, n2), (products, n1, n2)))
    is_padding = torch.rand(products) < padding
    p, q = ((torch.rand(products) ** skew * slices).long() for slices in (slices_p, slices_q))
    return a, b, grad, *(ids.masked_fill(is_padding, -1) for ids in (p, q))


def definition(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    there = (p >= 0).nonzero()[:, 0]
    products = torch.einsum("uik,ukj->uij", a[p.long()[there]], b[q.long()[there]])
    return products.new_zeros(len(p), a.shape[1], b.shape[2]).index_put((there,), products)


def differentiate(function: Callable[..., Tensor], a: Tensor, b: Tensor, grad: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of a and b."""
    a, b = (operand.detach().requires_grad_() for operand in (a, b))
    out = function(a, b, *ids)
    return out.detach(), *torch.autograd.grad(out, [a, b], grad)


def check(impl: str, a: Tensor, b: Tensor, grad: Tensor, p: Tensor, q: Tensor, tol: float = 1e-5) -> None:
    """Compare relative to the largest value; a `tol` of 1e-5 suits float32's sums of a thousand products."""
    found = differentiate(lambda *inputs: gathered_matmul(*inputs, impl), a, b, grad, p, q)
    expected = differentiate(definition, a.double(), b.double(), grad.double(), p, q)
    for name, tensor, exact in zip(("out", "da", "db"), found, expected, strict=True):
        assert tensor.dtype == a.dtype, name
        atol = tol * exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(
            tensor.double(), exact.to(a.dtype).double(), rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@every_impl
@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients(size: tuple[int, ...], impl: str) -> None:
    check(impl, *operands(size))


layout = st.sampled_from(LAYOUTS)


@settings(max_examples=60)
@given(
    size=st.tuples(
        *[st.integers(1, 40)] * 2,
        st.integers(0, 20),
        st.integers(0, 40),
        st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 63, 65, 100]),
        st.integers(0, 100),
    ),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    skew=st.sampled_from([1, 4, 1000]),
    layouts=st.tuples(layout, layout, layout, layout, layout),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes_ids_and_layouts(
    size: tuple[int, ...], padding: float, skew: int, layouts: tuple, index: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    *floats, p, q = operands(size, padding=padding, skew=skew)
    check("reference", *(lay(tensor) for lay, tensor in zip(layouts, (*floats, p.to(index), q.to(index)), strict=True)))


@every_impl
@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_operands(dtype: torch.dtype, padding: float, impl: str) -> None:
    *floats, p, q = operands((5, 7, 3, 4, 18, 11), padding=padding)
    # Sums of products of -1, 0 and 1 are exact here in every type, so there is no rounding error to allow for.
    check(impl, *((tensor.sign() * (tensor.abs() > 0.5)).to(dtype) for tensor in floats), p, q, tol=0.0)


@every_impl
def test_padding_ignores_gradients_that_are_nan(impl: str) -> None:
    a, b, grad, p, q = operands((5, 7, 3, 4, 5, 40), padding=0.5)
    poisoned = grad.masked_fill(p[:, None, None] < 0, torch.nan)
    compute = lambda a, b, p, q: gathered_matmul(a, b, p, q, impl)  # noqa: E731
    assert all(map(torch.equal, differentiate(compute, a, b, poisoned, p, q), differentiate(compute, a, b, grad, p, q)))


@every_impl
def test_gradients_that_are_views_of_one_number(impl: str) -> None:
    a, b, grad, p, q = operands(SIZES[0])
    check(impl, a, b, grad[:1, :1, :1].expand_as(grad), p, q)


def test_gradcheck() -> None:
    a, b, _, p, q = operands((3, 4, 2, 3, 2, 6), torch.float64, padding=0.3)
    inputs = a.requires_grad_(), b.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: gathered_matmul(a, b, p, q, "reference"), inputs)


@pytest.mark.parametrize("size", [(300, 200, 8, 16, 8, 5000), (1, 3, 8, 64, 20, 5000), (37, 20_000, 3, 5, 67, 999)])
def test_results_do_not_depend_on_the_number_of_threads(size: tuple[int, ...], on_threads: Callable) -> None:
    inputs = operands(size, skew=2)
    compute = lambda a, b, p, q: gathered_matmul(a, b, p, q, "reference")  # noqa: E731
    one, two, again = (on_threads(count, lambda: differentiate(compute, *inputs)) for count in (1, 2, 2))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(one, two, again, strict=True))


@every_impl
@pytest.mark.parametrize(
    ("size", "dtype", "lay"),
    [
        (SIZES[0], torch.float32, within),
        (SIZES[0], torch.float32, transposed),
        (SIZES[0], torch.bfloat16, within),
        ((4, 4, 2, 3, 5, 0), torch.float32, transposed),
        ((4, 4, 2, 0, 5, 6), torch.bfloat16, transposed),
    ],
)
def test_the_registration_follows_torch_librarys_rules(
    size: tuple[int, ...], dtype: torch.dtype, lay: Callable[[Tensor], Tensor], impl: str
) -> None:
    a, b, grad, p, q = operands(size, dtype, padding=0.3)
    a, b = lay(a), lay(b)
    torch.library.opcheck(torch.ops.comera_rec.gathered_matmul_backward.default, (grad, a, b, p, q, impl, False))
    inputs = (a.requires_grad_(), b.requires_grad_(), p, q, impl, False)
    tolerance = None if dtype == torch.float32 else 0.02
    torch.library.opcheck(torch.ops.comera_rec.gathered_matmul.default, inputs, atol=tolerance, rtol=tolerance)


def test_fake_and_meta_tensors_get_the_right_shape() -> None:
    with FakeTensorMode():
        a, b, _, p, q = operands(SIZES[0])
        assert gathered_matmul(a, b, p, q).shape == (11, 3, 2)
    a, b, _, p, q = (tensor.to("meta") for tensor in operands(SIZES[0], torch.bfloat16))
    out = gathered_matmul(a, b, p, q)
    assert (out.shape, out.dtype, out.device.type) == ((11, 3, 2), torch.bfloat16, "meta")


@every_impl
def test_torch_compile_traces_one_node(impl: str) -> None:
    a, b, grad, p, q = operands(SIZES[0])

    def function(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return gathered_matmul(a.sin(), b.mT.contiguous().mT, p, q, impl).square()

    # aot_eager traces forward and backward like every backend, and needs no compiler on the machine.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(differentiate(compiled, a, b, grad, p, q), differentiate(function, a, b, grad, p, q))


def test_torch_export_traces_one_node() -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
            return gathered_matmul(a, b, p, q)

    a, b, _, p, q = operands(SIZES[0])
    exported = torch.export.export(Model(), (a, b, p, q))
    assert [node.name for node in exported.graph.nodes if node.op == "call_function"] == ["gathered_matmul"]
    torch.testing.assert_close(exported.module()(a, b, p, q), definition(a, b, p, q))


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((2, 3, 4), (2, 5, 3), (6,), (6,)), r"\(2, 3, 4\), \(2, 5, 3\), \(6,\) and \(6,\)"),
        (((2, 3), (2, 3, 3), (6,), (6,)), r"\(2, 3\), \(2, 3, 3\)"),
        (((2, 3, 4), (2, 4, 3), (6,), (5,)), r"\(6,\) and \(5,\)"),
        (((2, 3, 4), (2, 4, 3), (6, 1), (6, 1)), r"\(6, 1\) and \(6, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], found: str) -> None:
    a, b = (torch.zeros(shape) for shape in shapes[:2])
    p, q = (torch.zeros(shape, dtype=torch.int64) for shape in shapes[2:])
    with pytest.raises(
        ValueError, match=r"gathered_matmul takes a \[P, n1, r\], b \[Q, r, n2\], p \[U\] and q \[U\], got .*" + found
    ):
        gathered_matmul(a, b, p, q)


@pytest.mark.parametrize(("p", "q"), [([0, 3], [0, 0]), ([0, 0], [4, 0]), ([-1, 3], [-1, 0])])
def test_ids_that_are_too_large_are_refused(p: list[int], q: list[int]) -> None:
    with pytest.raises(IndexError, match="out of range"):
        gathered_matmul(torch.zeros(3, 2, 2), torch.zeros(4, 2, 2), torch.tensor(p), torch.tensor(q), "reference")


@pytest.mark.parametrize(
    ("impl", "device", "dtype", "message"),
    [
        ("numpy", "cpu", torch.float32, "impl is 'numpy': choose 'auto' or one of 'reference', 'triton'"),
        ("triton", "cuda", torch.float64, "impl is 'triton', which computes in float32: give float64 to 'reference'"),
        ("triton", "cpu", torch.float32, "impl is 'triton', which needs a GPU, but the tensors are on cpu: move them there or"),
    ],
)
def test_implementations_that_cannot_run_are_refused(
    impl: str, device: str, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # whether Triton is installed here or not
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        resolve_impl(impl, torch.device(device), dtype)


@pytest.mark.parametrize("is_installed", [False, True])
def test_what_auto_stands_for(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if is_installed else None)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_impl("auto", cpu, torch.bfloat16) == "reference"
    assert resolve_impl("auto", cuda, torch.float32) == ("triton" if is_installed else "reference")
    assert resolve_impl("auto", cpu, torch.float64) == resolve_impl("auto", cuda, torch.float64) == "reference"
    if is_installed:
        assert resolve_impl("triton", cuda, torch.float32) == "triton"
    else:
        with pytest.raises(ValueError, match=r"triton is not installed: install it \(pip install triton\) or choose 'auto'"):
            resolve_impl("triton", cuda, torch.float32)
