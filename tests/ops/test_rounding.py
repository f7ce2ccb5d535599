"""Updates of 16-bit cores are rounded at random: small steps add up as in float32, and a seed reproduces them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from comera_rec import TTEmbeddingBag
from comera_rec.nn import update_in_backward_
from comera_rec.ops.bags.cpu import DTYPES
from comera_rec.tt import TTShape

STEPS, SHAPE = 40, TTShape((3, 2), (32, 32), (8,))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 2**-12}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 2**-9, "initial_accumulator_value": 16.0}),
    "Adam": (torch.optim.Adam, {"lr": 2**-12, "betas": (0.9, 0.9995)}),
}


def train(kind: str, dtype: torch.dtype, value: float) -> tuple[TTEmbeddingBag, torch.optim.Optimizer]:
    """Train on one row, whose gradient is small compared with the numbers of the cores and the optimizer's sums."""
    bag = TTEmbeddingBag(6, 1024, shape=SHAPE, dtype=dtype)
    for parameter in bag.parameters():
        nn.init.constant_(parameter, value)
    optimizer = OPTIMIZERS[kind][0](bag.parameters(), **OPTIMIZERS[kind][1])  # type: ignore[call-arg]
    update_in_backward_(bag, optimizer)
    for _ in range(STEPS):
        (bag(torch.tensor([[0]])).float().sum() / (32 * value**2)).backward()
    return bag, optimizer


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_small_steps_add_up(kind: str, dtype: torch.dtype) -> None:
    value = 1.0 if dtype == torch.bfloat16 else 8.0
    bag, optimizer = train(kind, dtype, value)
    exact, optimizer_of_exact = train(kind, torch.float32, value)
    for core, wide in ((bag.core_0, exact.core_0), (bag.core_1, exact.core_1)):
        states = (optimizer.state[core], optimizer_of_exact.state[wide])
        pairs = [(core, wide)] + [(states[0][name], states[1][name]) for name in states[0] if name != "step"]
        for narrow, expected in pairs:
            assert narrow.dtype == dtype
            mean, true = narrow[:, 0].float().mean().item(), expected[:, 0].mean().item()
            assert abs(mean - true) < 0.5 * torch.finfo(dtype).eps * abs(true)
    moved = value - exact.core_0[:, 0].mean().item()
    assert moved > 1.0 * torch.finfo(dtype).eps * value, "far enough to differ from unchanged cores"
    assert (bag.core_0[:, 1:] == value).all(), "slices that no row uses"


def test_a_seed_repeats_the_rounding() -> None:
    cores = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        cores.append(train("SGD", torch.bfloat16, 1.0)[0].core_0)
    assert torch.equal(cores[0], cores[1])
    assert not torch.equal(cores[0], cores[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_need_no_rounding_stay(dtype: torch.dtype) -> None:
    """This includes infinities, NaN, and numbers below the smallest normal one."""
    numbers = torch.tensor([0.0, -1.0, 3.5, 2.0**-14, 2.0**-24, -3 * 2.0**-24, float("inf"), float("nan")] * 32).to(dtype)
    bag = TTEmbeddingBag(6, 1024, shape=SHAPE, dtype=dtype)
    with torch.no_grad():
        bag.core_0[:, 0] = numbers.view(1, 32, 8)
    update_in_backward_(bag, torch.optim.SGD(bag.parameters(), lr=0.0))
    bag(torch.tensor([[0]])).float().nan_to_num().sum().backward()
    torch.testing.assert_close(bag.core_0[0, 0].flatten(), numbers, rtol=0, atol=0, equal_nan=True)
