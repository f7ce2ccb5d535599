"""A model that returns bags as they come from a sharded collection has its gradients averaged over processes, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints

import comera_rec as cr
from comera_rec.testing import run

pytestmark = pytest.mark.distributed

ROWS, SAMPLES = 900, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        table = cr.TTEmbeddingBagConfig(
            name="products", num_embeddings=ROWS, embedding_dim=8, feature_names=["clicked"], tt_ranks=4
        )
        self.bags = cr.TTEmbeddingBagCollection([table])

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled: KeyedTensor = self.bags(features)
        return pooled


def batch(processes: list[int], step: int) -> KeyedJaggedTensor:
    ids = [torch.randint(ROWS, (SAMPLES,), generator=torch.Generator().manual_seed(10 * step + process)) for process in processes]
    return KeyedJaggedTensor(
        keys=["clicked"], values=torch.cat(ids), lengths=torch.ones(SAMPLES * len(processes), dtype=torch.long)
    )


def train(model: nn.Module, processes: list[int]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(processes, step)).values().square().sum(1).mean().backward()
        optimizer.step()
    return {name.rpartition("bags.")[2]: value.detach() for name, value in model.named_parameters()}


def train_sharded(rank: int, kind: str) -> dict[str, Tensor]:
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder()]
    constraints = {"products": ParameterConstraints(sharding_types=[kind])}
    planner = cr.TTShardingPlanner(Topology(world_size=2, compute_device="cpu"), batch_size=SAMPLES, constraints=constraints)
    model: nn.Module = Model()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return train(DistributedModelParallel(model, plan=plan, sharders=sharders), [rank])


@pytest.mark.parametrize("kind", ["data_parallel", "row_wise"])
def test_gradients_are_those_of_one_process(kind: str) -> None:
    expected, results = train(Model(), [0, 1]), run(2, train_sharded, kind)
    for name, value in expected.items():
        parts = [result[name] for result in results]
        for part in parts if parts[0].shape == value.shape else [torch.cat(parts, dim=1)]:
            torch.testing.assert_close(part, value, atol=1e-5, rtol=1e-5, msg=lambda error, name=name: f"{name}: {error}")
