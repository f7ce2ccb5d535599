"""Learning rates over a run, for the optimizer and for tables that are updated in the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comera_rec.training.config import OptimizerConfig, load_config
from comera_rec.training.step import rate_factor
from comera_rec.training.trainer import Trainer


def factors(total_steps: int = 10, **schedule: float) -> list[float]:
    return [rate_factor(OptimizerConfig(**schedule), number, total_steps) for number in range(1, total_steps + 1)]  # type: ignore[arg-type]


def test_rates_rise_stay_and_fall() -> None:
    assert factors() == [1.0] * 10
    assert factors(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert factors(decay=0.5) == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2])
    assert factors(decay=1.0, warmup_steps=1) == pytest.approx([0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert min(factors(decay=0.001)) > 0


def test_a_run_ends_at_small_rates_for_tables_updated_in_backward_too(config_file: Path) -> None:
    moves = []
    for overrides in ([], ["optimizer.decay=1"]):
        settings = ["tables.format=dense", "training.steps=8", "optimizer.lr_dense=0.008", *overrides]
        trainer = Trainer(load_config(config_file, settings))
        table = next(table for name, table in trainer.model.state_dict().items() if name.endswith("embedding_bags.C1.weight"))
        before = table.clone()
        trainer.step(8, iter(trainer.loader))
        moves.append(table - before)
    assert {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}["dense"] == pytest.approx(0.001)
    assert moves[0].abs().max() > 0
    torch.testing.assert_close(moves[1], moves[0] / 8)


@pytest.mark.parametrize(("override", "named"), [("decay=1.5", "decay is 1.5"), ("warmup_steps=-1", "warmup_steps is -1")])
def test_bad_schedules_are_refused(config_file: Path, override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_config(config_file, [f"optimizer.{override}"])
