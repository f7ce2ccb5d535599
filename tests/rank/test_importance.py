"""Scores of ranks follow their definitions, and don't depend on how scale is spread over the cores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comera_rec import TTEmbeddingBag, TTLinear
from comera_rec.nn import TTModule
from comera_rec.rank.importance import TaylorScores
from comera_rec.tt import contract

MODULES = {
    "order 2": lambda: TTEmbeddingBag(60, 16, tt_ranks=5, dtype=torch.float64),
    "order 3": lambda: TTEmbeddingBag(60, 16, tt_ranks=(5, 3), dtype=torch.float64),
    "order 4": lambda: TTEmbeddingBag(60, 16, tt_ranks=(3, 4, 2), dtype=torch.float64),
    "linear": lambda: TTLinear(24, 20, tt_ranks=4, dtype=torch.float64),
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> TTModule:
    module: TTModule = MODULES[request.param]()
    with torch.no_grad():
        for rank in module.rank_parameters():
            rank.normal_()
    return module


def terms(module: TTModule, bond: int) -> list[Tensor]:
    """The matrix that each rank of a bond contributes."""
    rank, terms = module.rank_parameters()[bond], []
    for j in range(len(rank)):
        kept = rank.detach().clone()
        with torch.no_grad():
            rank.mul_(torch.arange(len(rank))[:, None] == j)
            terms.append(contract(module.scaled_cores()).reshape(module.shape.num_rows, module.shape.num_cols))
            rank.copy_(kept)
    return terms


def observed(module: TTModule, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(module.num_rows, module.num_cols, generator=generator, dtype=torch.float64)
    module.zero_grad()
    (scale * (module.dense_matrix() * direction).sum()).backward()
    scores = TaylorScores()
    scores.observe([module])
    return scores.scores([module])[0]


def rescale_(module: TTModule) -> None:
    """Move random factors between the cores and D, keeping the matrix the same."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for k, rank in enumerate(module.rank_parameters()):
            left, right = (10 ** torch.randn(2, len(rank), 1, generator=generator, dtype=torch.float64)).unbind()
            module.cores()[k].mul_(left.flatten())
            module.cores()[k + 1].mul_(right.view(-1, 1, 1, 1))
            rank.div_(left * right)


def test_taylor_scores_are_squared_first_order_changes(module: TTModule) -> None:
    direction = torch.randn(module.num_rows, module.num_cols, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cut = slice(module.num_rows), slice(module.num_cols)
    expected = [
        torch.stack([(term[cut] * direction).sum().square() for term in terms(module, bond)])
        for bond in range(module.shape.order - 1)
    ]
    total = torch.cat(expected).sum()
    for actual, exact in zip(observed(module), expected, strict=True):
        torch.testing.assert_close(actual, exact / total)


def test_neither_the_gauge_nor_the_scale_of_the_loss_matters(module: TTModule) -> None:
    before = observed(module)
    torch.testing.assert_close(observed(module, 65536.0), before)
    rescale_(module)
    torch.testing.assert_close(observed(module), before)


def test_scores_are_a_running_mean_of_shares() -> None:
    module, scores = MODULES["order 2"](), TaylorScores()
    shares = torch.eye(5, dtype=torch.float64)[:3]  # each step's loss depends on one rank only
    for share in shares:
        module.rank_1.grad = share[:, None] / module.rank_1.detach()
        scores.observe([module])
    expected = 0.98**2 * shares[0] + 0.98 * 0.02 * shares[1] + 0.02 * shares[2]
    torch.testing.assert_close(scores.scores([module])[0][0], expected)


def test_steps_without_finite_gradients_change_no_score() -> None:
    module = MODULES["order 2"]()
    scores = TaylorScores()
    with pytest.raises(ValueError, match=r"step\(\) found no gradients: call it after optimizer.step\(\), before zero_grad"):
        scores.scores([module])
    for gradient in (torch.ones(5), torch.full((5,), torch.inf), torch.zeros(5), None):
        module.rank_1.grad = None if gradient is None else gradient.double()[:, None]
        scores.observe([module], torch.sum)
        torch.testing.assert_close(scores.scores([module])[0][0], torch.full((5,), 0.2, dtype=torch.float64))
