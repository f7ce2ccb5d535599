"""Models in the style of public programs, with their tables swapped, managed collisions, and batches for them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from in_backward import _apply_optimizer_in_backward
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim import RowWiseAdagrad

import comera_rec as cr


def managed_collisions(tables: list, *, device: str = "cpu", interval: int = 1, buckets: int = 1) -> ManagedCollisionCollection:
    """Build managed collisions as large as the tables, which evict ids every `interval` batches."""
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device(device),
            eviction_interval=interval,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            buckets=buckets,
        )
        for config in tables
    }
    return ManagedCollisionCollection(modules, tables)


SAMPLES, DIM = 4, 8  # samples of a process
SIZES = {"user": 120, "item": 90, "place": 70, "day": 7}
CONFIG = cr.TableCompression(tt_ranks=2, min_rows=50)  # "day" stays dense


def tables(*names: str, kind: type = EmbeddingBagConfig) -> list[Any]:
    # TorchRec draws the values of sharded dense tables anew, so those here are all the same.
    dense = {"weight_init_min": 0.1, "weight_init_max": 0.1}
    return [
        kind(name=name, num_embeddings=SIZES[name], embedding_dim=DIM, feature_names=[name], **(dense if name == "day" else {}))
        for name in names
    ]


def collection(device: str, *names: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables(*names), device=torch.device(device))


class Program(nn.Module):
    """A model called with a batch, which returns its loss and the logits of its method `score`.

    Attributes:
        is_combined: whether one optimizer has the tables' and the dense one.
        is_sharded: whether it is trained on several processes, too.
    """

    is_combined = True
    is_sharded = True

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
    """Sequences whose TT tables the dense optimizer trains; one table has two features, and one of these two tables."""

    def __init__(self, device: str) -> None:
        super().__init__()
        configs = tables("item", "place", "user", "day", kind=EmbeddingConfig)
        configs[2].feature_names = ["user", "item"]
        self.history = EmbeddingCollection(configs, device=torch.device(device))
        self.block = nn.TransformerEncoderLayer(DIM, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.over = nn.Linear(DIM, 1)

    def score(self, batch: Batch) -> Tensor:
        rows = self.history(batch.sparse_features)
        keys = ("item@item", "place", "user", "item@user", "day")
        padded = sum((k + 1) * rows[key].to_padded_dense(4) for k, key in enumerate(keys))
        return self.over(self.block(padded).mean(dim=1)).squeeze(1)

    @classmethod
    def model(cls, device: str) -> nn.Module:
        model: Any = super().model(device)
        _apply_optimizer_in_backward(torch.optim.SGD, [model.history.embeddings["day"].weight], {"lr": 0.01})
        return model

    @staticmethod
    def dense_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)


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


PROGRAMS: dict[str, type[Program]] = {"dlrm": Dlrm, "two tower": TwoTower, "bert4rec": Bert4Rec, "managed": Managed}


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
