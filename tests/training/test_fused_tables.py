"""Dense tables that are updated in the backward pass."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.training.memory import PeakMemory
from comera_rec.training.model import fuse_dense_tables_

CPU = torch.device("cpu")


def collection(rows: int) -> nn.Sequential:
    tables = [EmbeddingBagConfig(name="large", num_embeddings=rows, embedding_dim=64, feature_names=["large"])]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


def test_tables_on_the_meta_device_are_initialized_in_place() -> None:
    fuse_dense_tables_(collection(9), 0.1, CPU)  # loads what the first call needs
    model, memory = collection(500_000), PeakMemory(CPU)
    fuse_dense_tables_(model, 0.1, CPU)
    (weight,) = model.state_dict().values()
    assert memory.highest < 1.4 * weight.nbytes / 2**20
    bound = 500_000**-0.5  # of a uniform distribution
    assert 0.999 * bound < weight.abs().max() <= bound
    assert abs(weight.std() * 3**0.5 / bound - 1) < 0.01
