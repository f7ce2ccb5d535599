"""Sequences on two processes, sharded in every way, train like one process on both batches."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from processes import run
from sharding import shard
from torch import Tensor, nn
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import comera_rec as cr

pytestmark = pytest.mark.distributed

LR = 0.02
# Ids of each feature, for the samples of each process: unequal on purpose, and one process has none of one feature.
IDS = [
    {"seen": [[5, 899, 5], [], [17]], "bought": [[], [880, 1], [5]], "site": [[2], [3], [2]]},
    {"seen": [[899]], "bought": [[450]], "site": [[]]},
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        items = cr.TTEmbeddingConfig(
            name="products", num_embeddings=900, embedding_dim=8, feature_names=["seen", "bought"], tt_ranks=4, hot_rows=((20, 4),)
        )
        again = cr.TTEmbeddingConfig(name="again", num_embeddings=900, embedding_dim=8, feature_names=["seen"], tt_ranks=2)
        sites = EmbeddingConfig(
            name="sites", num_embeddings=30, embedding_dim=8, feature_names=["site"], weight_init_min=0.3, weight_init_max=0.3
        )
        self.sequences = cr.TTEmbeddingCollection([items, sites, again])
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Sum over ids, so that losses of processes add up."""
        rows = self.sequences(features)
        names = ["seen@products", "bought", "site", "seen@again"]
        assert list(rows) == names
        scale = torch.cat([(k + 1.0) * torch.ones_like(rows[name].values()) for k, name in enumerate(names)])
        scores: Tensor = self.over(scale * torch.cat([rows[name].values() for name in names])).tanh()
        return scores


def batch(processes: list[int]) -> KeyedJaggedTensor:
    samples = {name: [ids for process in processes for ids in IDS[process][name]] for name in ("seen", "bought", "site")}
    values = [value for of_feature in samples.values() for ids in of_feature for value in ids]
    lengths = [len(ids) for of_feature in samples.values() for ids in of_feature]
    return KeyedJaggedTensor(keys=list(samples), values=torch.tensor(values), lengths=torch.tensor(lengths))


def train(model: nn.Module, features: KeyedJaggedTensor, world: int) -> list[float]:
    tables = [p for name, p in model.named_parameters() if "dense_bags" not in name or world == 1]
    optimizer, losses = torch.optim.SGD(tables, lr=LR), []
    for _ in range(3):
        loss = model(features).square().sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss * world).backward()  # averaged over processes
        optimizer.step()
    return losses


KINDS = [  # of the TT tables "products" and "again", and of the dense table "sites"
    ("data_parallel", "data_parallel", "table_wise"),
    ("table_wise", "table_wise", "row_wise"),
    ("row_wise", "row_wise", "table_wise"),
    ("row_wise", "table_wise", "table_wise"),
]


def train_sharded(rank: int) -> list[list[float]]:
    fused, losses = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}, []
    for kinds in KINDS:
        model = shard(Model(), dict(zip(("products", "again", "sites"), kinds, strict=True)), fused=fused)
        model.load_state_dict(model.state_dict())
        losses.append(train(model, batch([rank]), 2))
    return losses


def test_losses_are_those_of_one_process() -> None:
    expected = train(Model(), batch([0, 1]), 1)
    assert expected[2] < 0.95 * expected[0]
    found = torch.tensor(run(2, train_sharded)).sum(0)
    torch.testing.assert_close(found, torch.tensor([expected] * len(KINDS)), atol=1e-5, rtol=0)
