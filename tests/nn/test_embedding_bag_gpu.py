"""A training step of TTEmbeddingBag on a GPU, captured in a CUDA graph."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from comera_rec import TTEmbeddingBag, TTShape
from comera_rec.nn import update_in_backward_

pytestmark = pytest.mark.gpu
SHAPES = {2: TTShape((40, 30), (4, 8), 8), 3: TTShape((12, 10, 10), (4, 2, 4), 6), 4: TTShape((6, 6, 6, 6), (2, 2, 4, 2), 5)}


def captured(step: Callable[[], object], module: nn.Module) -> torch.cuda.CUDAGraph:
    """Capture a step after three eager ones, which create optimizer state, and restore the module's parameters."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    module.load_state_dict(state)
    return graph


@pytest.mark.parametrize(
    ("order", "name", "in_backward"),
    [*((order, "SGD", False) for order in SHAPES), *((2, name, True) for name in ("SGD", "Adagrad", "RowWiseAdagrad"))],
)
def test_a_training_step_is_captured_in_a_cuda_graph(order: int, name: str, in_backward: bool) -> None:
    """Replays equal eager steps; in backward also after the learning rate, a tensor, has changed."""
    kinds = pytest.importorskip("torchrec.optim") if name == "RowWiseAdagrad" else torch.optim
    torch.manual_seed(order)
    bag = TTEmbeddingBag(1200, 32, shape=SHAPES[order], device="cuda")
    eager = copy.deepcopy(bag)
    rates = [torch.tensor(0.01, device="cuda"), torch.tensor(0.01)]
    optimizers = [getattr(kinds, name)(module.cores(), lr=0.01) for module in (bag, eager)]
    if in_backward:
        for module, each, rate in zip((bag, eager), optimizers, rates, strict=True):
            update_in_backward_(module, each)
            each.param_groups[0]["lr"] = rate
    ids, offsets = torch.zeros(4096, dtype=torch.int64, device="cuda"), torch.arange(0, 4096, 2, device="cuda")

    def step(module: TTEmbeddingBag, each: torch.optim.Optimizer) -> None:
        each.zero_grad(set_to_none=False)
        (module(ids, offsets).square().sum() / 1000).backward()
        if not in_backward:
            each.step()

    graph = captured(lambda: step(bag, optimizers[0]), bag)
    step(eager, optimizers[1])
    eager.load_state_dict(bag.state_dict())
    initial = [core.detach().clone() for core in bag.cores()]
    for each in optimizers:  # sums of squares start anew
        for state in each.state.values():
            if "sum" in state:
                state["sum"].zero_()
    for number in range(4):
        for rate in rates:
            rate.fill_(0.01 if number < 2 else 0.05)
        ids.copy_(torch.randint(1200, (4096,)))
        graph.replay()
        step(eager, optimizers[1])
        torch.testing.assert_close(list(bag.parameters()), list(eager.parameters()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bag(ids, offsets), bag.to_dense()(ids, offsets), rtol=1e-4, atol=1e-4)
    assert all((actual - first).abs().max() > 1e-3 for actual, first in zip(bag.cores(), initial, strict=True))
