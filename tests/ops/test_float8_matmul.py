"""float8_matmul agrees with its definition in float64: outputs and both gradients; CUDA's layout rules are checked without CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comera_rec.ops import float8_matmul, require_float8
from comera_rec.ops.float8_matmul import BACKWARD, FORWARD, _scaled_mm, quantize, reference

# M, K, N: whole tiles of 16, partial ones, single rows and columns, whose strides are arbitrary, and typical ranks
SIZES = [(32, 48, 16), (7, 30, 12), (1, 1, 1), (16, 1, 5), (1, 16, 16), (33, 100, 1), (64, 12, 30), (1, 16, 1)]
DTYPES = [torch.float32, torch.bfloat16]


def operands(size: tuple[int, int, int], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Draw a, b, a bias and an upstream gradient."""
    m, k, n = size
    leaves = [torch.randn(*shape).to(device, dtype).requires_grad_() for shape in ((m, k), (k, n), (n,))]
    return [*leaves, torch.randn(m, n).to(device, torch.bfloat16)]


def outcome(matmul: Callable, a: Tensor, b: Tensor, bias: Tensor, upstream: Tensor) -> list[Tensor]:
    out = matmul(a, b, bias)
    assert out.is_contiguous()
    return [out.detach(), *torch.autograd.grad(out, (a, b, bias), upstream)]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error by norms."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert distance(one, other) < (
            1e-6 if one.dtype == torch.float32 else 2e-3
        )  # sums in float32 are sometimes rounded differently


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    dtype=st.sampled_from([FORWARD, BACKWARD]),
    source=st.sampled_from(DTYPES),
)
def test_numbers_come_back_within_the_formats_precision(values: list[float], dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.tensor(values).to(source).nan_to_num()  # the largest float32 numbers are infinite in bfloat16
    info, back = torch.finfo(dtype), reference.rounded(x, dtype)
    values8, scale = quantize(x, dtype)
    smallest = info.smallest_normal * info.eps * float(scale)
    allowed = (x.double().abs() * info.eps / 2).clamp(min=smallest / 2) * (1 + 1e-6)
    assert ((back - x.double()).abs() <= allowed).all()
    assert (back.sign() * x.sign() >= 0).all()
    if float(x.abs().max()) > 1e-30:
        assert float(values8.float().abs().max()) == info.max
    assert scale.dtype == torch.float32
    assert scale.shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_and_gradients(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = operands(size, dtype)
    actual = outcome(float8_matmul, *case)
    assert_same(actual, outcome(reference.float8_matmul, *case))
    a, b, bias, upstream = (part.detach().double() for part in case)
    exact = [a @ b + bias, upstream @ b.mT, a.mT @ upstream]
    assert all(distance(*pair) < 0.1 for pair in zip(actual[:3], exact, strict=True))
    assert size == (1, 1, 1) or distance(actual[1], exact[1]) > 0.005, "nothing was rounded to 8 bits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_and_layouts_change_nothing(dtype: torch.dtype) -> None:
    case = operands((20, 30, 40), dtype)
    expected = outcome(float8_matmul, *case)
    case[:2] = [each.detach().mT.contiguous().mT.requires_grad_() for each in case[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        actual = outcome(float8_matmul, *case)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty_products(size: tuple[int, int, int]) -> None:
    case = operands(size)
    out, grad_a, grad_b, _ = outcome(float8_matmul, *case)
    assert torch.equal(out, case[2].detach().bfloat16().expand(size[0], size[2]))
    assert (grad_a.shape, grad_b.shape) == (case[0].shape, case[1].shape)
    assert not grad_a.any()
    assert not grad_b.any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1, 3], ids=["a", "b", "upstream"])
def test_values_that_are_not_finite_give_nan(where: int, value: float) -> None:
    """A check of the loss, or a GradScaler, must detect them."""
    case = operands((20, 30, 40))
    with torch.no_grad():
        case[where][3, 5] = value
    out, grad_a, grad_b, _ = outcome(float8_matmul, *case)
    if where < 3:
        assert out.isnan().all()
    if where != 0:
        assert grad_a.isnan().all()
    if where != 1:
        assert grad_b.isnan().all()


def test_backward_keeps_the_8_bit_operands() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        float8_matmul(*operands((20, 30, 40))[:2])
    assert sorted((tensor.dtype, tensor.numel()) for tensor in kept if tensor.dim()) == [(FORWARD, 600), (FORWARD, 1200)]


def test_nothing_waits_for_the_device() -> None:
    """Fake tensors have no values, so reading one fails."""
    with FakeTensorMode():
        case = operands((20, 30, 40))
        actual = outcome(float8_matmul, *case)
        assert [tuple(part.shape) for part in actual] == [(20, 40), (20, 30), (30, 40), (40,)]
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            bool(actual[0].any())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_operands_have_the_layout_that_cuda_requires(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch applies the GPU's rules to fake tensors on a GPU."""
    scaled_mm, formats = torch._scaled_mm, []

    def checked(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **settings: object) -> Tensor:
        with FakeTensorMode():
            fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in (a, b, scale_a, scale_b)]
            scaled_mm(*fake, **settings)
        formats.append((a.dtype, b.dtype))
        return scaled_mm(a, b, scale_a, scale_b, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    monkeypatch.setattr(importlib.import_module(quantize.__module__), "_scaled_mm_on_cpu", _scaled_mm)
    outcome(float8_matmul, *operands(size))
    assert formats == [(FORWARD, FORWARD), (BACKWARD, FORWARD), (FORWARD, BACKWARD)]
    one = torch.ones(())
    for a, b in ((torch.ones(16, 16), torch.ones(16, 16)), (torch.ones(16, 30), torch.ones(16, 30).mT)):
        with pytest.raises(RuntimeError, match=r"col_major|divisible by 16"):
            checked(a.to(FORWARD), b.to(FORWARD), one, one, out_dtype=torch.bfloat16)


def test_devices_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_float8(torch.device("cpu"))
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    require_float8(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        ValueError, match=r"^float8 products need a GPU of compute capability 8.9 or later, and cuda:1 has 8.6: use bf"
    ):
        require_float8(cuda)
    with pytest.raises(ValueError, match=r"^float8 products don't run on mps with torch .*: use bfloat16$"):
        require_float8(torch.device("mps"))
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(ValueError, match=r"^float8 products don't run on cpu with torch .*: use bfloat16$"):
        require_float8(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, (4096, 768, 64)], ids=str)
def test_the_gpu_agrees_with_the_definition(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    try:
        require_float8(torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    case = operands(size, dtype, "cuda")
    actual, expected = outcome(float8_matmul, *case), outcome(reference.float8_matmul, *case)
    # Tensor cores accumulate with fewer bits than float32 has.
    assert all(distance(*pair) < 5e-3 for pair in zip(actual, expected, strict=True))
