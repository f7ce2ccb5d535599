"""A new user's first hour: swap, train, truncate, train on, save, load, export."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.rank import truncate_ranks_


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name="user", num_embeddings=20_000, embedding_dim=32, feature_names=["user"]),
            EmbeddingBagConfig(name="day", num_embeddings=7, embedding_dim=32, feature_names=["day"]),
        ]
        self.sparse = EmbeddingBagCollection(tables)
        self.head = nn.Linear(64, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(self.sparse(features).values()).squeeze(1)


def compressed() -> nn.Module:
    return cr.compress_(Model(), tables=cr.TableCompression(tt_ranks=8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, features: KeyedJaggedTensor) -> None:
    for _ in range(10):
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), torch.arange(64) % 2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_swap_train_truncate_save_load_export(tmp_path: Path) -> None:
    ids = torch.cat([torch.randint(20_000, (64,)), torch.randint(7, (64,))])
    features = KeyedJaggedTensor.from_lengths_sync(["user", "day"], ids, torch.ones(128, dtype=torch.int64))
    model = compressed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, features)
    ranks = truncate_ranks_(model, optimizer, threshold=float(model.sparse.tt_bag("user").rank_1.detach().abs().median()))
    assert ranks["sparse.tt_bags.user"] < (8,)
    train(model, optimizer, features)
    torch.save(model.state_dict(), tmp_path / "model.pt")

    loaded = compressed()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    dense = cr.export_dense(loaded)
    assert type(dense.sparse) is EmbeddingBagCollection
    assert cr.compression_report(loaded).ratio > 10
    torch.testing.assert_close(dense(features), model(features), rtol=0, atol=1e-5)
