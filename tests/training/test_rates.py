"""Learning rates over a run, for the optimizer and for tables that are updated in the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.training.config import load_config
from comera_rec.training.model import fuse_dense_tables_
from comera_rec.training.rates import LearningRates
from comera_rec.training.trainer import Trainer


def rates(warmup_steps: int = 0, decay: float = 0.0, *, total_steps: int = 10, as_tensors: bool = False) -> list[float]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}])
    schedule = LearningRates(optimizer, [], total_steps=total_steps, warmup_steps=warmup_steps, decay=decay, as_tensors=as_tensors)
    rates = []
    for step in range(1, total_steps + 1):
        schedule.set(step)
        rates.append(float(optimizer.param_groups[0]["lr"]) / 0.5)
    return rates


def test_rates_rise_stay_and_fall() -> None:
    assert rates() == [1.0] * 10
    assert rates(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates(decay=0.5) == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2])
    assert rates(decay=1.0, warmup_steps=1) == pytest.approx([0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert min(rates(decay=0.001)) > 0


def test_a_rate_in_a_tensor_is_changed_in_place() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    schedule = LearningRates(optimizer, [], total_steps=4, decay=1.0, as_tensors=True)
    rate = optimizer.param_groups[0]["lr"]
    schedule.set(3)
    assert isinstance(rate, Tensor)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.25)


def moved(step: int) -> Tensor:
    """How far a fused table's first update moves its rows if it is this step out of eight."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])]
    model = nn.Sequential(EmbeddingBagCollection(tables))
    optimizers = fuse_dense_tables_(model, 0.1, torch.device("cpu"))
    schedule = LearningRates(torch.optim.SGD([nn.Parameter(torch.ones(1))]), optimizers, total_steps=8, decay=1.0)
    before = next(model.parameters()).clone()
    schedule.set(step)
    features = KeyedJaggedTensor(keys=["f"], values=torch.arange(6), lengths=torch.ones(6, dtype=torch.int32))
    model(features).values().sum().backward()
    return next(model.parameters()) - before


def test_tables_updated_in_the_backward_pass_follow() -> None:
    full = moved(1)
    assert full.abs().max() > 0
    torch.testing.assert_close(moved(7), full / 4)


def test_a_run_ends_at_small_rates(config_file: Path) -> None:
    trainer = Trainer(load_config(config_file, ["optimizer.decay=1", "optimizer.lr_dense=0.008", "training.steps=8"]))
    trainer.train()
    assert {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}["dense"] == pytest.approx(0.001)


@pytest.mark.parametrize(("override", "named"), [("decay=1.5", "decay is 1.5"), ("warmup_steps=-1", "warmup_steps is -1")])
def test_bad_schedules_are_refused(config_file: Path, override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_config(config_file, [f"optimizer.{override}"])
