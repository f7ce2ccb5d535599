"""Sharded tables send as many bytes as the planner says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from sharding import shard
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import comera_rec as cr
from comera_rec.recsys.sharding.planner import count_bytes

pytestmark = pytest.mark.distributed

WORLD, BATCH, ROWS, DIM = 4, 655, 20_000, 64
SHAPE = cr.TTShape.for_table(ROWS, DIM, tt_ranks=1)


class Values(nn.Module):
    """The values of a collection's output; DDP averages gradients only of a model that returns tensors."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.collection(features).values()


@contextmanager
def counted(model: DistributedModelParallel) -> Iterator[Counter[str]]:
    """Count bytes sent by collective: those that TorchRec calls, and DDP's all-reduce as a ring, 2 (W - 1) / W of them."""
    sent: Counter[str] = Counter()
    wrapped = model._dmp_wrapped_module
    if isinstance(wrapped, DistributedDataParallel):

        def count_and_reduce(group, bucket):  # DDP reads annotations, which must not be strings
            sent["all-reduce"] += round(2 * (WORLD - 1) / WORLD * bucket.buffer().nbytes)
            return allreduce_hook(group, bucket)

        wrapped.register_comm_hook(dist.group.WORLD, count_and_reduce)
    rank = dist.get_rank()
    sizes: Mapping[str, Callable[..., int]] = {
        "all_to_all_single": lambda output, input, output_split_sizes=None, input_split_sizes=None, **_: (
            input.nbytes - (input_split_sizes[rank] * input[:1].nbytes if input_split_sizes else input.nbytes // WORLD)
        ),
        "all_gather": lambda tensor_list, tensor, **_: tensor.nbytes * (WORLD - 1),
        "all_gather_into_tensor": lambda output_tensor, input_tensor, **_: input_tensor.nbytes * (WORLD - 1),
        "reduce_scatter": lambda output, input_list, **_: sum(part.nbytes for k, part in enumerate(input_list) if k != rank),
        "reduce_scatter_tensor": lambda output, input, **_: input.nbytes - output.nbytes,
    }

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            collective = name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor").replace("_", "-")
            sent[collective] += sizes[name](*args, **kwargs)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in sizes:
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        yield sent


KINDS = ("data_parallel", "table_wise", "row_wise")


def sent_in_a_step(rank: int) -> list[Counter[str]]:
    """Count what a process sends, for each sharding type."""
    table = cr.TTEmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"], shape=SHAPE)
    features, counts = KeyedJaggedTensor(["f"], torch.randint(ROWS, (BATCH,)), lengths=torch.ones(BATCH, dtype=torch.int64)), []
    for kind in KINDS:
        sharded = shard(Values(cr.TTEmbeddingBagCollection([table])), {"t": kind}, batch=BATCH)
        with counted(sharded) as sent:
            sharded(features).sum().backward()
        counts.append(Counter(sent))
    return counts


def expected(kind: str) -> dict[str, float]:
    counts = count_bytes(kind, SHAPE, DIM, 1, BATCH, BATCH, WORLD)
    if kind == "data_parallel":
        return {"all-reduce": counts["gradients"]}
    if kind == "table_wise":  # the owner alone sends bags, and the others alone send their gradients
        return {"all-to-all": counts["ids"] + 2 * counts["bags"] / WORLD}
    bags = {"reduce-scatter": counts["bags"], "all-gather": counts["bags"]}
    return {"all-to-all": counts["ids"], "all-reduce": counts["gradients"], **bags}


def test_counted_bytes_agree_with_the_planners_in_every_collective() -> None:
    for kind, *of_processes in zip(KINDS, *run(WORLD, sent_in_a_step), strict=True):
        total = sum(of_processes, Counter())
        assert set(total) <= {*expected(kind), "all-to-all"}
        for collective, size in expected(kind).items():
            # Besides these, processes send each other sizes.
            assert total[collective] / WORLD == pytest.approx(size, rel=0.01, abs=200), (kind, collective)
