"""TTEmbeddingBag on a GPU: the same values as on CPU, and a training step captured in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from comera_rec import TTEmbeddingBag, TTShape

pytestmark = pytest.mark.gpu
SHAPES = {2: TTShape((40, 30), (4, 8), 8), 3: TTShape((12, 10, 10), (4, 2, 4), 6), 4: TTShape((6, 6, 6, 6), (2, 2, 4, 2), 5)}


def build(order: int, mode: str) -> tuple[TTEmbeddingBag, TTEmbeddingBag]:
    """The same bag on CPU and GPU."""
    torch.manual_seed(order)
    on_cpu = TTEmbeddingBag(1200, 32, shape=SHAPES[order], mode=mode)
    on_gpu = TTEmbeddingBag(1200, 32, shape=SHAPES[order], mode=mode, device="cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    return on_cpu, on_gpu


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("order", SHAPES)
def test_gpu_and_cpu_agree(order: int, mode: str) -> None:
    on_cpu, on_gpu = build(order, mode)
    ids, offsets = torch.randint(1200, (5000,)), torch.arange(0, 5000, 5)
    expected, actual = on_cpu(ids, offsets), on_gpu(ids.cuda(), offsets.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    actual.backward(upstream.cuda())
    for a, b in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", SHAPES)
def test_a_training_step_is_captured_in_a_cuda_graph(order: int) -> None:
    _, bag = build(order, "sum")
    _, eager = build(order, "sum")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (bag, eager)]
    ids, offsets = torch.zeros(4096, dtype=torch.int64, device="cuda"), torch.arange(0, 4096, 2, device="cuda")

    def step(module: TTEmbeddingBag, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        module(ids, offsets).square().sum().backward()
        optimizer.step()

    state = {name: value.clone() for name, value in bag.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(bag, optimizers[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(bag, optimizers[0])
    bag.load_state_dict(state)
    for _ in range(3):
        ids.copy_(torch.randint(1200, (4096,)))
        graph.replay()
        step(eager, optimizers[1])
        for actual, expected in zip(bag.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
