"""Models in the style of public programs, with their tables swapped, and batches for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from in_backward import _apply_optimizer_in_backward
from managed import managed_collisions
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

import comera_rec as cr

SAMPLES, DIM = 4, 8  # samples of a process
SIZES = {"user": 120, "item": 90, "place": 70, "day": 7}
CONFIG = cr.TableCompression(tt_ranks=2, min_rows=50)  # "day" stays dense


def tables(*names: str) -> list[EmbeddingBagConfig]:
    # TorchRec draws the values of sharded dense tables anew, so those here are all the same.
    dense = {"weight_init_min": 0.1, "weight_init_max": 0.1}
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=SIZES[name], embedding_dim=DIM, feature_names=[name], **(dense if name == "day" else {})
        )
        for name in names
    ]


def collection(device: str, *names: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables(*names), device=torch.device(device))


class Program(nn.Module, ABC):
    """A model called with a batch, which returns its loss and logits.

    Attributes:
        is_combined: whether one optimizer has the tables' and the dense one.
        is_sharded: whether it is trained on several processes, too.
    """

    is_combined = True
    is_sharded = True

    @abstractmethod
    def score(self, batch: Batch) -> Tensor:
        """Return logits."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.score(batch)
        return F.binary_cross_entropy_with_logits(logits, batch.labels.float()), logits

    @classmethod
    def model(cls, device: str) -> nn.Module:
        return cr.compress_(cls(device), tables=CONFIG)

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)

    @staticmethod
    def served(model: Any, batch: Batch) -> tuple[nn.Module, Any]:
        """What is exported, and a sample of its arguments."""
        return model, (batch,)


class Dlrm(Program):
    """Facebook's DLRM script: every optimizer in one, tables updated in backward."""

    @classmethod
    def model(cls, device: str) -> nn.Module:
        dlrm = DLRM(collection(device, *SIZES), dense_in_features=3, dense_arch_layer_sizes=[8, DIM], over_arch_layer_sizes=[8, 1])
        model = cr.compress_(DLRMTrain(dlrm), tables=CONFIG)
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.05, "eps": 1e-8})
        return model

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.05)

    @staticmethod
    def served(model: Any, batch: Batch) -> tuple[nn.Module, Any]:
        return model.model, (batch.dense_features, batch.sparse_features)


class TwoTower(Program):
    """TorchRec's retrieval: tables of two collections are updated by row-wise Adagrad, which the dense optimizer doesn't know."""

    is_combined = False

    def __init__(self, device: str) -> None:
        super().__init__()
        self.query, self.candidate = collection(device, "user", "place"), collection(device, "item")
        self.query_proj, self.candidate_proj = nn.Linear(2 * DIM, 4), nn.Linear(DIM, 4)

    def score(self, batch: Batch) -> Tensor:
        query = self.query_proj(self.query(batch.sparse_features).values())
        return (query * self.candidate_proj(self.candidate(batch.sparse_features).values())).sum(dim=1)

    @classmethod
    def model(cls, device: str) -> nn.Module:
        model: Any = super().model(device)
        for part in (model.query, model.candidate):
            _apply_optimizer_in_backward(RowWiseAdagrad, part.parameters(), {"lr": 0.05})
        return model


class Bert4Rec(Program):
    """Sequences whose tables the dense optimizer trains."""

    def __init__(self, device: str) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(name=name, num_embeddings=SIZES[name], embedding_dim=DIM, feature_names=[name])
            for name in ("item", "place")
        ]
        self.history = EmbeddingCollection(configs, device=torch.device(device))
        self.block = nn.TransformerEncoderLayer(DIM, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.over = nn.Linear(DIM, 1)

    def score(self, batch: Batch) -> Tensor:
        rows = self.history(batch.sparse_features)
        padded = rows["item"].to_padded_dense(4) + rows["place"].to_padded_dense(4)
        return self.over(self.block(padded).mean(dim=1)).squeeze(1)

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)


class DeepFm(Program):
    """TorchRec's DeepFM, which takes its inputs apart from the labels."""

    def __init__(self, device: str) -> None:
        super().__init__()
        names = ("user", "item", "place")  # without the dense table: sharded, TorchRec updates it by SGD unless told otherwise
        self.deepfm = SimpleDeepFMNN(3, collection(device, *names), hidden_layer_size=32, deep_fm_dimension=32)

    def score(self, batch: Batch) -> Tensor:
        return self.deepfm(batch.dense_features, batch.sparse_features).squeeze(1)

    @staticmethod
    def served(model: Any, batch: Batch) -> tuple[nn.Module, Any]:
        return model.deepfm, {"sparse_features": batch.sparse_features, "dense_features": batch.dense_features}


class MultiTask(Program):
    """Experts shared by two tasks through gates (MMoE); two tables of different dimensions look up the users."""

    def __init__(self, device: str) -> None:
        super().__init__()
        wide = EmbeddingBagConfig(name="taste", num_embeddings=SIZES["user"], embedding_dim=2 * DIM, feature_names=["user"])
        self.sparse = EmbeddingBagCollection([*tables("item", "user"), wide], device=torch.device(device))
        width = 4 * DIM + 3
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.ReLU()) for _ in range(3))
        self.gates = nn.ModuleDict({task: nn.Linear(width, 3) for task in ("click", "buy")})
        self.towers = nn.ModuleDict({task: nn.Linear(8, 1) for task in ("click", "buy")})

    def tasks(self, dense: Tensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled = self.sparse(sparse).to_dict()
        inputs = torch.cat([pooled["user@user"], pooled["item"], pooled["user@taste"], dense], dim=1)
        experts = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        mixed = {task: (gate(inputs).softmax(1).unsqueeze(2) * experts).sum(1) for task, gate in self.gates.items()}
        return {task: self.towers[task](part).squeeze(1) for task, part in mixed.items()}

    def score(self, batch: Batch) -> Tensor:
        return sum(self.tasks(batch.dense_features, batch.sparse_features).values())

    @staticmethod
    def served(model: Any, batch: Batch) -> tuple[nn.Module, Any]:
        return _Tasks(model), (batch.dense_features, batch.sparse_features)


class _Tasks(nn.Module):
    def __init__(self, model: MultiTask) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        return {task: logits.sigmoid() for task, logits in self.model.tasks(dense, sparse).items()}


class Managed(Program):
    """Ids of any size, which managed collisions map to rows; a dense table beside them."""

    is_sharded = False

    def __init__(self, device: str) -> None:
        super().__init__()
        configs = tables("place", "user")
        managed = managed_collisions(configs, device=device)
        self.sparse = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), managed)
        self.day = nn.EmbeddingBag(SIZES["day"], DIM, mode="sum", include_last_offset=True)
        self.over = nn.Linear(3 * DIM, 1)

    def score(self, batch: Batch) -> Tensor:
        features = batch.sparse_features
        ids = KeyedJaggedTensor(features.keys(), features.values() + 10**12, lengths=features.lengths())
        day = features["day"]
        return self.over(torch.cat([self.sparse(ids)[0].values(), self.day(day.values(), day.offsets())], dim=1)).squeeze(1)


PROGRAMS: dict[str, type[Program]] = {
    "dlrm": Dlrm,
    "two tower": TwoTower,
    "bert4rec": Bert4Rec,
    "deepfm": DeepFm,
    "multi-task": MultiTask,
    "managed": Managed,
}


def batch(step: int, processes: range) -> Batch:
    """The samples of some processes, with bags of 1 to 4 ids."""
    lengths, values, dense, labels = [], [], [], []
    for process_rank in processes:
        generator = torch.Generator().manual_seed(10 * step + process_rank)
        lengths.append(torch.randint(1, 5, (len(SIZES), SAMPLES), generator=generator))
        values.append(
            [
                torch.randint(rows, (int(count),), generator=generator)
                for rows, count in zip(SIZES.values(), lengths[-1].sum(1), strict=True)
            ]
        )
        dense.append(torch.rand(SAMPLES, 3, generator=generator))
        labels.append(torch.randint(2, (SAMPLES,), generator=generator))
    by_feature = [part for feature in zip(*values, strict=True) for part in feature]
    sparse = KeyedJaggedTensor(list(SIZES), torch.cat(by_feature), lengths=torch.cat(lengths, dim=1).flatten())
    return Batch(dense_features=torch.cat(dense), sparse_features=sparse, labels=torch.cat(labels))
