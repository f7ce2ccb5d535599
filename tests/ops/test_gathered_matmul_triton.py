"""The Triton kernels agree with the float64 reference: on CPU in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comera_rec.ops.gathered_matmul import reference

kernels = pytest.importorskip("comera_rec.ops.gathered_matmul.triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHUNK = kernels.CHUNK

# P, Q slices; n1 x r times r x n2; U products
SIZES = [
    (5, 7, 3, 4, 2, 11),
    (1, 1, 1, 1, 1, 1),
    (13, 3, 5, 1, 7, 64),  # rank 1, primes, many repeats
    (200, 2, 8, 32, 8, 30),  # most slices unused
    (40000, 3, 2, 3, 2, 50),  # ids of 32 bits
    (17, 29, 8, 8, 8, 100),
    (3, 50, 2, 17, 66, 20),  # sizes beyond one tile
    (3, 4, 37, 5, 3, 20),
    (4, 4, 2, 3, 5, 0),  # nothing looked up
    (4, 4, 2, 0, 5, 6),  # every rank truncated away
    (4, 4, 0, 3, 5, 6),
    (0, 0, 2, 3, 5, 6),  # padding only
]


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("test_triton_interpreter.py runs it in a process of its own")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return request.param


def operands(size: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    slices_p, slices_q, n1, rank, n2, products = size
    a, b, grad = torch.randn(slices_p, n1, rank), torch.randn(slices_q, rank, n2), torch.randn(products, n1, n2)
    p, q = (torch.randint(slices, (products,)) if slices else torch.full((products,), -1) for slices in (slices_p, slices_q))
    return *(tensor.to(device, dtype) for tensor in (a, b, grad)), p.to(device), q.to(device)


def ternary(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round to -1, 0 and 1: sums of up to 256 products are exact in every dtype, so there is no rounding error to allow for."""
    return tuple(tensor.sign() * (tensor.abs() > 0.5) if tensor.is_floating_point() else tensor for tensor in tensors)


def check(
    a: Tensor, b: Tensor, grad: Tensor, p: Tensor, q: Tensor, actual: tuple[Tensor, ...] | None = None, tol: float = 1e-5
) -> None:
    """Compare output and gradients relative to the largest value; a `tol` of 1e-5 suits float32's sums of thousands of products."""
    actual = actual or (kernels.forward(a, b, p, q), *kernels.backward(grad, a, b, p, q))
    p, q = p.cpu(), q.cpu()
    expected_grads = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in (a, b)]
    out = torch.zeros(grad.shape, dtype=torch.float64)
    if a.numel() and b.numel() and grad.numel():
        a64, b64, grad64 = (tensor.double().cpu() for tensor in (a, b, grad))
        out, expected_grads = reference.forward(a64, b64, p, q), reference.backward(grad64, a64, b64, p, q)
    for name, tensor, expected in zip(("out", "da", "db"), actual, (out, *expected_grads), strict=True):
        assert tensor.dtype == a.dtype, name
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(
            tensor.double().cpu(), expected, rtol=0, atol=tol * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients_match_the_reference(size: tuple[int, ...], device: str) -> None:
    check(*operands(size, device))


def test_32_bit_ids(device: str) -> None:
    a, b, grad, p, q = operands(SIZES[0], device)
    check(a, b, grad, p.int(), q.int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[2]])
def test_16_bit_operands(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(*ternary(operands(size, device, dtype)), tol=0.0)


def test_16_bit_operands_are_summed_in_float32(device: str) -> None:
    a, b, grad = (torch.ones(shape, device=device, dtype=torch.bfloat16) for shape in ((1, 1, 2), (1, 2, 1), (512, 1, 1)))
    ids = torch.zeros(512, device=device, dtype=torch.int64)
    check(a, b, grad, ids, ids, tol=0.0)  # in bfloat16, 1 + 1 + ... stops growing at 256


def test_float64_is_refused(device: str) -> None:
    a, b, _, p, q = operands(SIZES[0], device, torch.float64)
    with pytest.raises(
        ValueError, match=r"a is torch\.float64: the GPU kernels compute in float32; give float64 to impl='reference'"
    ):
        kernels.forward(a, b, p, q)


@pytest.mark.parametrize(
    "padded",
    [
        pytest.param(lambda n: torch.rand(n) < 0.5, id="scattered"),
        pytest.param(lambda n: torch.arange(n) >= n // 8, id="tail"),
        pytest.param(lambda n: torch.arange(n) < CHUNK, id="whole chunk"),
        pytest.param(lambda n: torch.ones(n, dtype=torch.bool), id="all"),
    ],
)
def test_padded_rows_give_zeros_and_no_gradient(padded, device: str) -> None:  # type: ignore[no-untyped-def]
    a, b, grad, p, q = operands((9, 5, 3, 4, 5, 170), device)
    mask = padded(170).to(device)
    p, q = p.masked_fill(mask, -1), q.masked_fill(mask, -1)
    grad = grad.masked_fill(mask[:, None, None], torch.nan)
    actual = (kernels.forward(a, b, p, q), *kernels.backward(grad, a, b, p, q))
    check(a, b, grad.nan_to_num(), p, q, actual)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [5 * CHUNK],  # one slice has all rows
        [CHUNK, CHUNK - 1, 1, 2 * CHUNK, 3, CHUNK, 0, 1],  # segments that end at or near the end of a chunk
        [1, 40 * CHUNK, 1],  # more parts than are summed at once
        [1] * (CHUNK + 3),
        [CHUNK + 1] * 3,
    ],
)
def test_segments_of_any_length(lengths: list[int], shuffled: bool, device: str) -> None:
    p = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    a, b, grad, _, q = operands((len(lengths), 3, 2, 3, 1, len(p)), device)
    check(a, b, grad, (p[torch.randperm(len(p))] if shuffled else p).to(device), q)


@pytest.mark.parametrize("real", [0, 1, CHUNK, 170])
def test_ascending_ids_are_not_sorted(real: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, grad, p, q = operands((9, 5, 3, 4, 5, 170), device)
    p, beyond = p.sort().values, torch.arange(170, device=device) >= real
    p, q = p.masked_fill(beyond, -1), q.masked_fill(beyond, -1)
    sorts, sort = [], torch.sort
    monkeypatch.setattr(torch, "sort", lambda *args, **options: sorts.append(args) or sort(*args, **options))
    out = kernels.forward(a, b, p, q, p_ascends=True).masked_fill((p < 0)[:, None, None], 0.0)
    actual = (out, *kernels.backward(grad, a, b, p, q, p_ascends=True))
    assert len(sorts) == 1, "one sort, of q"
    check(a, b, grad, p, q, actual)


def test_strided_operands(device: str) -> None:
    a, b, grad, p, q = operands((5, 7, 3, 4, 3, 40), device)
    ids = torch.stack([p, q], 1)
    check(b.mT, a.mT, grad.mT, ids[:, 1], ids[:, 0])
    check(a, b, grad[:1, :1, :1].expand_as(grad), p, q)
    check(a[:, ::2], b[..., 1:], grad[:, ::2, 1:], p, q)


def test_results_are_reproducible_bit_by_bit(device: str) -> None:
    a, b, grad, p, q = operands((4, 3, 3, 5, 4, 300), device)
    first, second = ((kernels.forward(a, b, p, q), *kernels.backward(grad, a, b, p, q)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@settings(max_examples=12)
@given(
    size=st.tuples(*[st.integers(1, 40)] * 2, *[st.integers(1, 9)] * 3, st.integers(0, 100)),
    padding=st.sampled_from([0.0, 0.3, 0.9]),
    skew=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.skipif(not INTERPRETED, reason="test_triton_interpreter.py runs it in a process of its own")
def test_any_ids_and_sizes(size: tuple[int, ...], padding: float, skew: int, seed: int) -> None:
    torch.manual_seed(seed)
    a, b, grad, _, _ = operands(size, "cpu")
    p, q = ((torch.rand(size[5]) ** skew * slices).long() for slices in size[:2])
    padded = torch.rand(size[5]) < padding
    check(a, b, grad, p.masked_fill(padded, -1), q.masked_fill(padded, -1))


REAL_SIZES = [(3000, 2500, 8, rank, 8, 50_000) for rank in (8, 16, 32, 64)] + [
    (3000, 2500, 4, 32, 16, 50_000),
    (50, 60, 4, 32, 128, 20_000),
    (200_000, 3, 8, 32, 8, 100_000),
]


def zipf_ids(slices: int, products: int) -> Tensor:
    """Draw ids of which the first few are used by most products."""
    return (slices ** torch.rand(products)).long() - 1


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("size", REAL_SIZES)
def test_real_sizes(size: tuple[int, ...], dtype: torch.dtype, tol: float) -> None:
    a, b, grad, _, _ = operands(size, "cuda", dtype)
    p, q = (zipf_ids(slices, size[5]).sort().values.cuda() for slices in size[:2])
    q = q[torch.randperm(size[5], device="cuda")]
    check(a, b, grad, p, q, tol=tol)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_ids() -> None:
    size = (300, 250, 8, 16, 8, 5000)
    a, b, grad, p, q = operands(size, "cuda")

    def step() -> tuple[Tensor, ...]:
        return kernels.forward(a, b, p, q), *kernels.backward(grad, a, b, p, q)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels, which is not allowed during a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step()
    for real_rows in (5000, 700, 0):
        for buffer, fresh in zip((a, b, grad), operands(size, "cuda")[:3], strict=True):
            buffer.copy_(fresh)
        for buffer, slices in ((p, 300), (q, 250)):
            buffer.fill_(-1)
            buffer[:real_rows] = zipf_ids(slices, real_rows).cuda()
        graph.replay()
        torch.cuda.synchronize()
        check(a, b, grad, p, q, actual)


@pytest.mark.gpu
def test_no_copy_of_the_gathered_slices_is_made() -> None:
    a, b, grad, p, q = operands((1000, 1000, 8, 64, 8, 200_000), "cuda")
    kernels.backward(grad, a, b, p, q)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.backward(grad, a, b, p, q)
    parts = 8 * 200_000 * 8 * 64 // CHUNK  # bytes, of one operand at a time
    order = 200_000 * 64
    cores = 3 * (a.nbytes + b.nbytes)
    assert torch.cuda.max_memory_allocated() - before < parts + order + cores < 200_000 * 8 * 64 * 4 // 8
