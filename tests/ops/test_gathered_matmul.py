"""The hot primitive against nested loops: output and every gradient, odd sizes, and what torch.library promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comera_rec.ops import gathered_matmul
from comera_rec.ops.gathered_matmul import IMPLEMENTATIONS, resolve_impl

# P, Q slices; n1 x r times r x n2; U products
SIZES = [
    (5, 7, 3, 4, 2, 11),
    (1, 1, 1, 1, 1, 1),
    (13, 3, 5, 1, 7, 64),  # rank 1, primes, many repeats
    (200, 2, 8, 32, 8, 3),  # most slices never met
    (4, 4, 2, 3, 5, 0),  # nothing looked up
    (4, 4, 2, 0, 5, 6),  # every rank truncated away
]


def operands(size: tuple[int, ...], dtype: torch.dtype, index: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    slices_p, slices_q, n1, rank, n2, products = size
    a = torch.randn(slices_p, n1, rank, dtype=dtype, requires_grad=True)
    b = torch.randn(slices_q, rank, n2, dtype=dtype, requires_grad=True)
    p = torch.randint(slices_p, (products,), dtype=index)
    q = torch.randint(slices_q, (products,), dtype=index)
    return a, b, p, q


def by_loops(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    products = [a[i] @ b[j] for i, j in zip(p.tolist(), q.tolist(), strict=True)]
    return torch.stack(products) if products else a.new_zeros(0, a.shape[1], b.shape[2]) * (a.sum() + b.sum())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients_match_loops(size: tuple[int, ...], dtype: torch.dtype, index: torch.dtype, impl: str) -> None:
    a, b, p, q = operands(size, dtype, index)
    found = gathered_matmul(a, b, p, q, impl)
    expected = by_loops(a, b, p, q)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    found_grads = torch.autograd.grad((found * weights).sum(), [a, b])
    expected_grads = torch.autograd.grad((expected * weights).sum(), [a, b])
    torch.testing.assert_close(found_grads, expected_grads)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradients_of_slices_met_many_times_add_up(impl: str) -> None:
    a = torch.ones(3, 1, 1, requires_grad=True)
    b = torch.full((2, 1, 1), 2.0, requires_grad=True)
    gathered_matmul(a, b, torch.tensor([1, 1, 1, 2]), torch.tensor([0, 0, 1, 1]), impl).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.flatten().tolist() == [0.0, 6.0, 2.0]
    assert b.grad.flatten().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradcheck(impl: str) -> None:
    a, b, p, q = operands((3, 4, 2, 3, 2, 6), torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: gathered_matmul(a, b, p, q, impl), (a, b))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_operands_and_gradients(impl: str) -> None:
    a, b, p, q = operands((5, 7, 3, 4, 3, 11), torch.float64)
    transposed = gathered_matmul(b.mT, a.mT, q, p, impl).mT
    torch.testing.assert_close(transposed, gathered_matmul(a, b, p, q, impl))
    torch.testing.assert_close(
        torch.autograd.grad(transposed.sum(), [a, b]), torch.autograd.grad(gathered_matmul(a, b, p, q, impl).sum(), [a, b])
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [SIZES[0], SIZES[4]])
def test_the_registration_keeps_torch_librarys_promises(size: tuple[int, ...], impl: str) -> None:
    a, b, p, q = operands(size, torch.float32)
    torch.library.opcheck(torch.ops.comera_rec.gathered_matmul.default, (a, b, p, q, impl))
    grad = torch.randn(size[5], size[2], size[4])
    torch.library.opcheck(torch.ops.comera_rec.gathered_matmul_backward.default, (grad, a.detach(), b.detach(), p, q, impl))


def test_fake_and_meta_tensors_get_the_right_shape() -> None:
    with FakeTensorMode():
        a, b, p, q = operands(SIZES[0], torch.float32)
        assert gathered_matmul(a, b, p, q).shape == (11, 3, 2)
    meta = [tensor.to("meta") for tensor in operands(SIZES[0], torch.bfloat16)]
    out = gathered_matmul(*meta)
    assert (out.shape, out.dtype, out.device.type) == ((11, 3, 2), torch.bfloat16, "meta")


def test_torch_compile_sees_one_node() -> None:
    a, b, p, q = operands(SIZES[0], torch.float32)
    # aot_eager traces forward and backward as every compiler does, and needs none on the machine.
    compiled = torch.compile(lambda *inputs: gathered_matmul(*inputs).square().sum(), fullgraph=True, backend="aot_eager")
    plain = gathered_matmul(a, b, p, q).square().sum()
    torch.testing.assert_close(compiled(a, b, p, q), plain)
    torch.testing.assert_close(torch.autograd.grad(compiled(a, b, p, q), [a, b]), torch.autograd.grad(plain, [a, b]))


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


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"impl is 'numpy': choose 'auto' or one of 'reference'"):
        resolve_impl("numpy")
    assert resolve_impl("auto") in IMPLEMENTATIONS
