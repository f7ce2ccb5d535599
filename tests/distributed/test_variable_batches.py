"""Features with batch sizes of their own, sharded in every way, train like one process on all batches."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharding import shard
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.testing import run

pytestmark = pytest.mark.distributed

LR = 0.02
FEATURES = ["user", "item", "site"]
# Of each process, the different bags of each feature, and the bags that its samples have.
BAGS = [
    {"user": [[5, 899, 5], []], "item": [[880, 1], [5], [7, 8], [2]], "site": [[2], [3], [2, 4]]},
    {"user": [[899]], "item": [[450, 1], [5]], "site": [[]]},
]
SAMPLES = [[[0, 1, 1, 0, 1], [3, 2, 1, 0, 0], [2, 2, 0, 1, 0]], [[0, 0], [1, 0], [0, 0]]]


class Model(nn.Module):
    def __init__(self, weighted: bool, with_dense: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        average = PoolingType.SUM if weighted else PoolingType.MEAN
        tables: list[EmbeddingBagConfig] = [
            Table(name="two", num_embeddings=900, embedding_dim=8, feature_names=["user", "item"], tt_ranks=4, hot_rows=((20, 4),)),
            Table(name="wide", num_embeddings=900, embedding_dim=16, feature_names=["user"], tt_ranks=2, pooling=average),
        ]
        if with_dense:
            tables.insert(
                1,
                EmbeddingBagConfig(
                    name="sites", num_embeddings=30, embedding_dim=8, feature_names=["site"],
                    weight_init_min=0.3, weight_init_max=0.3,
                ),
            )  # fmt: skip
        self.bags = cr.TTEmbeddingBagCollection(tables, weighted)
        self.bags.tt_bag("two").set_row_order_(torch.randperm(900))
        self.over = nn.Linear(sum(each.embedding_dim * len(each.feature_names) for each in tables), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.over(self.bags(features).values()).tanh()
        return scores


def batch(processes: list[int], weighted: bool, *, repeated: bool = False) -> KeyedJaggedTensor:
    """Join batches of processes; `repeated` bags are given once for each sample instead of by inverse indices."""
    bags: dict[str, list[list[int]]] = {name: [] for name in FEATURES}
    samples: list[list[int]] = [[] for _ in FEATURES]
    for process in processes:
        for name, indices, own in zip(FEATURES, samples, SAMPLES[process], strict=True):
            indices += [len(bags[name]) + index for index in own]
            bags[name] += BAGS[process][name]
    if repeated:
        bags = {name: [bags[name][index] for index in own] for name, own in zip(FEATURES, samples, strict=True)}
    values = torch.tensor([value for of_feature in bags.values() for ids in of_feature for value in ids])
    return KeyedJaggedTensor(
        FEATURES, values, 1 / (1.0 + values) if weighted else None,
        lengths=torch.tensor([len(ids) for of_feature in bags.values() for ids in of_feature]),
        stride_per_key_per_rank=None if repeated else [[len(of_feature)] for of_feature in bags.values()],
        inverse_indices=None if repeated else (FEATURES, torch.tensor(samples)),
    )  # fmt: skip


def train(model: nn.Module, batches: list[KeyedJaggedTensor], world: int) -> list[float]:
    """Train a step on each batch; losses of processes add up."""
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    tables = [p for name, p in inner.named_parameters() if "dense_bags" not in name or world == 1]
    optimizer, losses = torch.optim.SGD(tables, lr=LR), []
    for features in batches:
        loss = model(features).square().sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss * world).backward()  # averaged over processes
        optimizer.step()
    return losses


def train_sharded(process_rank: int, kinds: tuple[str, str], weighted: bool, repeated: list[bool], with_dense: bool) -> list[float]:
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    model = shard(
        Model(weighted, with_dense), dict(zip(("two", "wide"), kinds, strict=True)) | {"sites": "table_wise"}, fused=fused
    )
    return train(model, [batch([process_rank], weighted, repeated=each) for each in repeated], 2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [("data_parallel", "data_parallel"), ("table_wise", "table_wise"), ("row_wise", "row_wise"), ("row_wise", "table_wise")],
)
def test_losses_are_those_of_one_process(kinds: tuple[str, str], weighted: bool) -> None:
    expected = train(Model(weighted, True), [batch([0, 1], weighted, repeated=True)] * 3, 1)
    assert expected[2] < 0.95 * expected[0]
    torch.testing.assert_close(train(Model(weighted, True), [batch([0, 1], weighted)] * 3, 1), expected, atol=1e-5, rtol=0)
    found = torch.tensor(run(2, train_sharded, kinds, weighted, [False] * 3, True)).sum(0)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise"])
def test_batches_of_one_size_may_come_between(kind: str) -> None:
    expected = train(Model(False, False), [batch([0, 1], False, repeated=True)] * 3, 1)
    found = torch.tensor(run(2, train_sharded, (kind, kind), False, [True, False, True], False)).sum(0)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


def without_inverse_indices(process_rank: int) -> str:
    features = batch([process_rank], False)
    bare = KeyedJaggedTensor(
        FEATURES, features.values(), lengths=features.lengths(), stride_per_key_per_rank=features.stride_per_key_per_rank()
    )
    with pytest.raises(ValueError, match="batch sizes") as error:
        shard(Model(False, False))(bare)
    return str(error.value)


def test_inverse_indices_are_required() -> None:
    for message in run(2, without_inverse_indices):
        assert (
            message == "features have different batch sizes: give the KeyedJaggedTensor inverse indices, or one batch size for all"
        )
