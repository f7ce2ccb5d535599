"""Sharded collections train as one process would on the same global batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from processes import run
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding import ShardedTTEmbeddingBagCollection

pytestmark = pytest.mark.distributed

LR = 0.1
FEATURES = ["shared", "left", "right", "mean", "small"]
UNEVEN = [3, 5, 2, 4]  # samples of each process
EVEN = [4, 4, 4, 4]  # gloo's gather, which TorchRec's row-wise dist goes back by, takes no others
KINDS = ("data_parallel", "table_wise", "row_wise")


@dataclass(frozen=True)
class Case:
    """`kinds` of the trains in their order, or one for all."""

    kinds: tuple[str, ...]
    weighted: bool = False

    def sizes(self, world: int) -> list[int]:
        return (EVEN if "row_wise" in self.kinds else UNEVEN)[:world]


def tables(weighted: bool) -> list[Table]:
    return [
        Table(name="two", num_embeddings=1000, embedding_dim=16, feature_names=["shared", "left"], tt_ranks=4),
        Table(name="three", num_embeddings=700, embedding_dim=128, feature_names=["right"], tt_ranks=3),
        # TorchRec initializes sharded dense tables anew, so this one is constant.
        Table(name="small", num_embeddings=20, embedding_dim=24, feature_names=["small"], weight_init_min=0.1, weight_init_max=0.1),
        Table(
            name="average",
            num_embeddings=900,
            embedding_dim=32,
            feature_names=["mean", "shared"],
            shape=cr.TTShape((8, 12, 10), (4, 2, 4), (3, 3)),
            pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
        ),
    ]


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = TTEmbeddingBagCollection(tables(case.weighted), case.weighted)
        self.over = nn.Linear(sum(self.bags.output_lengths()), 3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Loss as the pipeline wants it, and the logits."""
        pooled = self.bags(features)
        logits = self.over(pooled.values())
        return logits.square().mean(), logits


def global_batch(step: int, samples: int, weighted: bool) -> list[KeyedJaggedTensor]:
    """One KeyedJaggedTensor a sample: no, one or several ids; "left" is always empty in the first sample."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for sample in range(samples):
        lengths = torch.randint(0, 4, (len(FEATURES),), generator=generator)
        if not sample:
            lengths[1] = 0
        limits = torch.tensor([900, 1000, 700, 900, 20]).repeat_interleave(lengths)
        values = (torch.rand(len(limits), generator=generator) * limits).long()
        weights = torch.rand(len(limits), generator=generator) if weighted else None
        batch.append(KeyedJaggedTensor(FEATURES, values, weights, lengths=lengths))
    return batch


def joined(samples: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    lengths = torch.stack([sample.lengths() for sample in samples], dim=1)
    pieces = [sample[key] for key in FEATURES for sample in samples]
    weights = torch.cat([piece.weights() for piece in pieces]) if samples[0].weights_or_none() is not None else None
    return KeyedJaggedTensor(FEATURES, torch.cat([piece.values() for piece in pieces]), weights, lengths=lengths.flatten())


def share(step: int, rank: int, case: Case) -> KeyedJaggedTensor:
    sizes = case.sizes(dist.get_world_size())
    first = sum(sizes[:rank])
    return joined(global_batch(step, sum(sizes), case.weighted)[first : first + sizes[rank]])


def sharded(case: Case) -> DistributedModelParallel:
    world = dist.get_world_size()
    names = ["two", "three", "average"]
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in zip(names, case.kinds * 3, strict=False)
    }
    constraints["small"] = ParameterConstraints(sharding_types=["table_wise"])
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))]
    planner = cr.TTShardingPlanner(Topology(world_size=world, compute_device="cpu"), batch_size=8, constraints=constraints)
    model = Model(case)
    return DistributedModelParallel(model, plan=planner.collective_plan(model, sharders, dist.group.WORLD), sharders=sharders)


def train_sharded(rank: int, case: Case) -> dict[str, Tensor]:
    """Train three steps; every parameter that this process holds, row shards cut to size, and the last logits."""
    torch.manual_seed(rank)
    model = sharded(case)
    assert isinstance(model.module.bags, ShardedTTEmbeddingBagCollection)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sizes = case.sizes(dist.get_world_size())
    for step in range(3):
        _, logits = model(share(step, rank, case))
        loss = logits.square().sum() * len(sizes) / (sum(sizes) * logits.shape[1])  # the mean over processes is the global mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    outcome = {name: value.detach() for name, value in model.module.bags.state_dict().items() if name.startswith("tt_bags")}
    outcome = {f"bags.{name}": value.to_local() if hasattr(value, "to_local") else value for name, value in outcome.items()}
    outcome |= {f"over.{name}": value.detach() for name, value in model.module.over.named_parameters()}
    return {**outcome, "logits": logits.detach()}


def train_single(case: Case, world: int) -> dict[str, Tensor]:
    model = Model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(3):
        loss, logits = model(joined(global_batch(step, sum(case.sizes(world)), case.weighted)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**{name: value.detach() for name, value in model.named_parameters()}, "logits": logits.detach()}


@pytest.mark.parametrize(
    ("world", "case"),
    [
        *((2, Case((kind,), weighted)) for kind in KINDS for weighted in (False, True)),
        (2, Case(("row_wise", "table_wise", "data_parallel"))),
        (4, Case(("table_wise", "data_parallel", "row_wise"))),
        (4, Case(("row_wise",))),
    ],
    ids=str,
)
def test_parameters_and_outputs_are_those_of_one_process(world: int, case: Case) -> None:
    expected = train_single(case, world)
    results = run(world, train_sharded, case)
    assert torch.allclose(torch.cat([result.pop("logits") for result in results]), expected["logits"], atol=1e-5)
    for name in [name for name in expected if name.startswith(("bags.tt_bags", "over"))]:
        held = [result[name] for result in results if name in result]
        assert held, f"nobody holds {name}"
        # A divided core is put together; replicas must all be right.
        pieces = [torch.cat(held, dim=1)] if held[0].shape != expected[name].shape else held
        for piece in pieces:
            assert torch.allclose(piece, expected[name], atol=1e-5), name
