"""Pooling in Triton against its definition: in Triton's interpreter on CPU, and on a GPU where there is one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comera_rec.ops.bags import reference, tt_bags
from comera_rec.ops.plan import LookupPlan, plan_lookup

kernels = pytest.importorskip("comera_rec.ops.bags.triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MODES = [("sum", False), ("sum", True), ("mean", False), ("max", False)]
LENGTHS = {
    "jagged": lambda: torch.randint(0, 5, (24,)),
    "empty": lambda: torch.zeros(24, dtype=torch.int64),
    "one id each": lambda: torch.ones(24, dtype=torch.int64),
    "one long bag": lambda: torch.tensor([0, 90] + [0] * 22),
}


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("test_pooling_in_the_interpreter runs it in a process of its own")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return request.param


@pytest.mark.skipif(INTERPRETED, reason="it is this process")
def test_pooling_in_the_interpreter() -> None:
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    run = subprocess.run(arguments, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def draw(lengths: Tensor, distinct: int, spare: int, device: str) -> tuple[LookupPlan, Tensor]:
    """A plan of ids over one table, the last `spare` in no bag; and offsets."""
    ids = torch.randint(0, distinct, (int(lengths.sum()) + spare,)).to(device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)
    return plan_lookup([ids], [(10, 10)], impl="reference"), offsets


def differentiate(pool: Callable[..., Tensor], rows: Tensor, weights: Tensor | None, num_cols: int) -> tuple[Tensor, ...]:
    """Bags, and gradients of rows and of weights, by a gradient of the bags that is the same for both."""
    operands = [tensor.detach().requires_grad_() for tensor in (rows, weights) if tensor is not None]
    out = pool(*operands)
    upstream = torch.arange(out.numel(), device=out.device, dtype=out.dtype).view(out.shape).sin()
    return out.detach(), *torch.autograd.grad(out, operands, upstream)


def check(plan: LookupPlan, offsets: Tensor, mode: str, weighted: bool, *, num_cols: int, width: int, features: int = 2) -> None:
    count = len(plan.inverse)
    rows = torch.randn(count, width).to(plan.inverse.device)
    weights = torch.rand(count).to(rows) + 0.5 if weighted else None

    def fast(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        return kernels.pool_rows(rows, plan, offsets, weights, mode=mode, features=features, num_cols=num_cols)

    def slow(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        inverse, ends = plan.inverse.cpu(), offsets.cpu()
        return reference.pool_rows(rows[:, :num_cols], inverse, ends, weights, mode=mode, features=features)

    found = differentiate(fast, rows, weights, num_cols)
    expected = differentiate(slow, rows.double().cpu(), None if weights is None else weights.double().cpu(), num_cols)
    met = plan.rows[0].cpu() >= 0  # rows beyond have no gradient
    found, expected = ((out, of_rows.cpu()[met], *rest) for out, of_rows, *rest in (found, expected))
    for name, mine, right in zip(("bags", "gradient of rows", "gradient of weights"), found, expected, strict=False):
        torch.testing.assert_close(mine.double().cpu(), right, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("mode", "weighted"), MODES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_bags_and_gradients_match_the_definition(lengths: str, mode: str, weighted: bool, device: str) -> None:
    plan, offsets = draw(LENGTHS[lengths](), 9, 3, device)
    check(plan, offsets, mode, weighted, num_cols=7, width=9)


@pytest.mark.parametrize("count", [1, kernels.CHUNK, kernels.CHUNK + 1, 5 * kernels.CHUNK])
@pytest.mark.parametrize("distinct", [1, 2, 100])
def test_rows_of_any_number_of_ids(distinct: int, count: int, device: str) -> None:
    plan, offsets = draw(torch.full((count,), 1), distinct, 0, device)
    check(plan, offsets, "sum", False, num_cols=4, width=4, features=1)


def test_more_columns_than_a_tile(device: str) -> None:
    plan, offsets = draw(torch.full((6,), 2), 5, 0, device)
    check(plan, offsets, "max", False, num_cols=130, width=132)


def test_ties_of_a_maximum_have_one_winner(device: str) -> None:
    plan, offsets = draw(torch.tensor([3, 3]), 1, 0, device)
    rows = torch.ones(6, 4, device=device, requires_grad=True)
    kernels.pool_rows(rows, plan, offsets, None, mode="max", features=1, num_cols=4).sum().backward()
    assert rows.grad is not None
    assert rows.grad[0].tolist() == [2.0] * 4, "one id of each bag, though all are alike"


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tables_of_any_order_have_the_references_gradients(order: int, device: str) -> None:
    modes, cols = ((30,), (6, 5), (3, 5, 2), (2, 3, 5, 1))[order - 1], ((4,), (2, 2), (2, 2, 1), (2, 1, 2, 1))[order - 1]
    ranks = [1, *range(3, 2 + order), 1]
    cores = [torch.randn(r, m, n, s) for r, m, n, s in zip(ranks, modes, cols, ranks[1:], strict=False)]
    diagonals = [torch.rand(rank) + 0.5 for rank in ranks[1:-1]]
    ids, offsets = torch.randint(30, (40,)), torch.arange(0, 41, 5)
    found = []
    for impl, where in (("triton", device), ("reference", "cpu")):
        moved = [[tensor.clone().to(where).requires_grad_() for tensor in tensors] for tensors in (cores, diagonals)]
        plan = plan_lookup([ids.to(where)], [modes], impl="reference")
        tt_bags([(moved[0], moved[1])], plan, offsets.to(where), num_cols=4, impl=impl).cos().sum().backward()
        found.append([tensor.grad.cpu() for tensors in moved for tensor in tensors if tensor.grad is not None])
    assert len(found[0]) == 2 * order - 1
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_row_of_very_many_ids_on_a_gpu() -> None:
    plan, offsets = draw(torch.full((40_000,), 1), 1, 0, "cuda")
    check(plan, offsets, "sum", False, num_cols=64, width=64)


def test_nothing_is_sorted_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, offsets = draw(torch.full((6,), 2), 5, 0, device)
    rows = torch.randn(len(plan.inverse), math.prod((2, 2)), device=device, requires_grad=True)
    bags = kernels.pool_rows(rows, plan, offsets, None, mode="sum", features=1, num_cols=4)
    monkeypatch.setattr(torch, "sort", lambda *args, **options: pytest.fail("the plan has the order"))
    bags.sum().backward()
