"""Schedules reach targets in every unit, over all layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from comera_rec import RankConfig, RankScheduler, TTEmbeddingBag, TTLinear
from comera_rec.rank import count_tt_params
from comera_rec.rank.scheduler import allowed_size

ROWS = 240


class Recommender(nn.Module):
    """A model with six tables of several sizes, a TT layer, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = [1.0] * 6
        rows = (400, 300, 700, 500, 900, 350)
        self.tables = nn.ModuleList(TTEmbeddingBag(m, 8, tt_ranks=(16,), std=0.3) for m in rows)
        self.layer = TTLinear(48, 32, tt_ranks=12)
        self.head = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([table(ids) * read for table, read in zip(self.tables, self.reads, strict=True)], dim=1)
        return self.head(torch.tanh(self.layer(rows))).squeeze(1)


IDS = torch.arange(ROWS)[:, None]


def expected(seed: int) -> Tensor:
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(seed))


class Run:
    """A training run that can be stopped and resumed."""

    def __init__(self, config: RankConfig, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.target = Recommender(), expected(seed)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = RankScheduler(self.model, self.optimizer, config)

    def go(self, steps: int) -> float:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(IDS) - self.target).square().mean()
            self.scheduler.loss(loss).backward()
            self.optimizer.step()
            self.scheduler.step()
        return float(loss.detach())


def config(**changes: Any) -> RankConfig:
    return RankConfig(**{"early_steps": 10, "late_steps": 40, "truncate_every": 5, "gamma": 0.0, "threshold": 0.01, **changes})


# The dense model's bytes, of tables and the layer, and those of the layer's bias and the head, which aren't compressed.
DENSE, OTHERS = 4 * (8 * 3150 + 48 * 32), 4 * (32 + 32 + 1)


@pytest.mark.parametrize(
    ("unit", "target", "expected_bytes"),
    [
        *(("target_size", share, lambda early, share=share: share * early) for share in (0.8, 0.2, 0.1)),
        ("target_params", 9000, lambda early: 36_000),
        ("target_params", 10**7, lambda early: early),
        ("target_bytes", 20_000, lambda early: 20_000),
        ("target_compression", 5.0, lambda early: (DENSE + OTHERS) / 5 - OTHERS),
    ],
)
def test_the_size_ends_at_its_target(unit: str, target: float, expected_bytes: Callable[[int], float]) -> None:
    run = Run(config(objective="budget", **{unit: target}))
    run.go(10)
    early = 4 * count_tt_params(run.model)
    run.go(41)
    assert run.scheduler.stage == "done"
    actual = run.scheduler.history[-1]["bytes"]
    assert actual == 4 * sum(p.numel() for name, p in run.model.named_parameters() if "core" in name or "rank" in name)
    close = 0.98 if target == 0.1 else 0.99  # a rank takes up to 3 % of the smallest budget
    assert close * expected_bytes(early) <= actual <= expected_bytes(early) + 4
    assert target < 10**7 or actual == early, "nothing to remove"


def test_truncation_is_spread_over_the_stage_and_late_steps_remove_less() -> None:
    run = Run(config(objective="budget", target_size=0.2))
    run.go(51)
    sizes = [entry["params"] for entry in run.scheduler.history if entry["step"] >= 10]
    drops = [a - b for a, b in itertools.pairwise(sizes)]
    assert sum(drop > 0 for drop in drops) >= 6
    assert max(drops) < 0.5 * (sizes[0] - sizes[-1]), sizes
    assert drops[0] > 3 * drops[-1]
    assert [allowed_size(progress, 0.2) for progress in (0, 1)] == [1.0, pytest.approx(0.2)]


def test_ranks_go_where_the_loss_needs_them_though_magnitudes_lie() -> None:
    """Half of the tables are unused; scale is moved between cores and D so that |D| is largest for those."""
    run = Run(config(objective="budget", target_size=0.3, early_steps=20))
    run.model.reads = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    with torch.no_grad():
        for i, table in enumerate(run.model.tables):
            factor = 10.0 if i >= 3 else 0.1
            table.rank_1.mul_(factor)
            table.core_0.div_(factor)
    run.go(61)
    assert [table.shape.num_params for table in run.model.tables[3:]] == [0, 0, 0]


def test_hot_rows_that_explain_all_gradients_leave_their_table_a_rank() -> None:
    """Only ids with hot rows are read, and the cores' scale is tiny: by their scores, the cores would go first."""
    torch.manual_seed(0)
    table = TTEmbeddingBag(400, 8, tt_ranks=(8,), hot_rows=((ROWS, 4),), std=1e-4)
    optimizer = AdamW(table.parameters(), lr=0.01)
    scheduler = RankScheduler(table, optimizer, config(objective="budget", target_size=0.4))
    target = torch.randn(ROWS, 8)
    for _ in range(51):
        optimizer.zero_grad()
        scheduler.loss((table(IDS) - target).square().mean()).backward()
        table.rank_1.grad.zero_()
        optimizer.step()
        scheduler.step()
    (block,) = table.hot_blocks()
    assert scheduler.history[-1]["ranks"] == {"": [1], "hot_rows.0": list(block.shape.ranks)}
    assert sum(parameter.numel() for parameter in table.parameters()) <= scheduler.target
    assert 0 < block.shape.ranks[0] < 4


def test_a_compression_beyond_what_the_dense_layers_allow_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"target_compression is 500.0 but layers outside TT modules take 260 of .* dense bytes: give"
    ):
        Run(config(objective="budget", target_compression=500.0))
