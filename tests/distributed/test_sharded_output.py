"""A model that returns bags as they come from a sharded collection has its gradients averaged over processes, too."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

import comera_rec as cr

pytestmark = pytest.mark.distributed

ROWS, SAMPLES = 900, 4


class Model(nn.Module):
    def __init__(self, is_pooled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        table = cr.TTEmbeddingBagConfig(
            name="products", num_embeddings=ROWS, embedding_dim=8, feature_names=["clicked"], tt_ranks=4
        )
        self.bags = cr.TTEmbeddingBagCollection([table], is_pooled=is_pooled)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled: KeyedTensor = self.bags(features)
        return pooled


def batch(processes: list[int], step: int) -> KeyedJaggedTensor:
    ids = [torch.randint(ROWS, (SAMPLES,), generator=torch.Generator().manual_seed(10 * step + process)) for process in processes]
    return KeyedJaggedTensor(
        keys=["clicked"], values=torch.cat(ids), lengths=torch.ones(SAMPLES * len(processes), dtype=torch.long)
    )


def train(model: nn.Module, processes: list[int]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters())}], lr=0.5
    )  # of no parameters, where all are on another process
    for step in range(3):
        optimizer.zero_grad()
        model(batch(processes, step)).values().square().sum(1).mean().backward()
        optimizer.step()
    return {name.rpartition("bags.")[2]: value.detach() for name, value in model.named_parameters()}


BY_HAND = {"data_parallel": data_parallel(), "table_wise": table_wise(rank=1), "row_wise": row_wise()}


def by_hand(model: Model, generator: Any) -> ShardingPlan:
    sharder: Any = cr.TTEmbeddingBagCollectionSharder()
    return ShardingPlan({"bags": construct_module_sharding_plan(model.bags, {"products": generator}, sharder, 2, 2, "cpu")})


def train_by_hand(rank: int) -> list[dict[str, Tensor]]:
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder()]
    models = [Model() for _ in BY_HAND]
    plans = map(by_hand, models, BY_HAND.values())
    return [
        train(DistributedModelParallel(model, plan=plan, sharders=sharders), [rank])
        for model, plan in zip(models, plans, strict=True)
    ]


def test_gradients_are_those_of_one_process() -> None:
    expected = train(Model(), [0, 1])
    for kind, *results in zip(BY_HAND, *run(2, train_by_hand), strict=True):
        for name, value in expected.items():
            parts = [result[name] for result in results if name in result]
            for part in parts if parts[0].shape == value.shape else [torch.cat(parts, dim=1)]:
                message = lambda error, kind=kind, name=name: f"{kind}, {name}: {error}"  # noqa: E731
                torch.testing.assert_close(part, value, atol=1e-5, rtol=1e-5, msg=message)


def names_and_order(rank: int) -> None:
    sharder: Any = cr.TTEmbeddingBagCollectionSharder()
    for kind in ("data_parallel", "row_wise"):
        small = EmbeddingBagConfig(name="small", num_embeddings=9, embedding_dim=8)
        model: Any = nn.ModuleDict({"bags": cr.TTEmbeddingBagCollection([*Model().bags.embedding_bag_configs(), small])})
        names = list(model.state_dict())
        shard(model["bags"], {"products": BY_HAND[kind], "small": table_wise(rank=0)}, sharder=sharder)
        assert list(model.state_dict()) == names


def test_torchrecs_composable_sharding_keeps_names_and_their_order() -> None:
    run(2, names_and_order)


REFUSED = {
    "table 'products': TT tables don't support sharding type 'column_wise': choose one": column_wise(ranks=[0, 1]),
    "table 'products': the plan gives it to process 2, but there are 2: choose one from 0 to 1": table_wise(rank=2),
    "table 'products': TT tables have no compute kernel 'fused_uvm': leave compute_kernel out": row_wise(
        compute_kernel="fused_uvm"
    ),
}


def refused(rank: int) -> list[str]:
    model, messages = Model(), []
    for generator in REFUSED.values():
        with pytest.raises(ValueError, match="products") as error:
            DistributedModelParallel(model, plan=by_hand(model, generator), sharders=[cr.TTEmbeddingBagCollectionSharder()])
        messages.append(str(error.value))
    return messages


def test_plans_by_hand_that_tt_tables_cannot_follow_are_refused() -> None:
    for messages in run(2, refused):
        for message, expected in zip(messages, REFUSED, strict=True):
            assert message.startswith(expected)


def output_and_gradient(kind: str, is_pooled: bool, precision: CommType) -> Tensor:
    """Return what comes back, with the gradient of the leading core, all in one tensor."""
    model, config = Model(is_pooled), QCommsConfig(forward_precision=precision, backward_precision=precision)
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs))]
    sharded = DistributedModelParallel(model, plan=by_hand(model, BY_HAND[kind]), sharders=sharders)
    rows = sharded(batch([dist.get_rank()], 0)).values()
    rows.square().sum().backward()
    gradients = [parameter.grad.flatten() for parameter in sharded.parameters() if parameter.grad is not None]
    return torch.cat([rows.detach().flatten(), *gradients])


SENT = list(product(("table_wise", "row_wise"), (True, False)))


def exact_and_rounded(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [(output_and_gradient(*case, CommType.FP32), output_and_gradient(*case, CommType.FP16)) for case in SENT]


def test_what_is_sent_is_quantized_as_the_codecs_say() -> None:
    for case, *processes in zip(SENT, *run(2, exact_and_rounded), strict=True):
        for exact, rounded in processes:
            assert not torch.equal(exact[: 8 * SAMPLES], rounded[: 8 * SAMPLES]), case
            torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-3)
        gradients = [torch.cat([each[8 * SAMPLES :] for each in of_precision]) for of_precision in zip(*processes, strict=True)]
        assert not torch.equal(*gradients), case
