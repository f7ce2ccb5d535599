"""Counts the bytes that a process sends to others through a sharded model's collectives, as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel


def ring_bytes(size: float, world_size: int) -> float:
    """Bytes that a process sends in a ring all-reduce of `size` bytes: 2 (W - 1) / W of them."""
    return 2 * (world_size - 1) / world_size * size


class Counting:
    """Counts bytes by collective within a `with` block: the collectives that TorchRec calls, and DDP's all-reduce as a ring.

    Args:
        model: its DistributedDataParallel's all-reduce is counted; a model can have only one counter.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self.sent: Counter[str] = Counter()
        self._kept: dict[str, Callable[..., Any]] = {}
        wrapped = model._dmp_wrapped_module
        if isinstance(wrapped, DistributedDataParallel):

            def count_and_reduce(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which must not be strings
                self.sent["all-reduce"] += round(ring_bytes(bucket.buffer().nbytes, dist.get_world_size()))
                return allreduce_hook(group, bucket)

            wrapped.register_comm_hook(dist.group.WORLD, count_and_reduce)

    def __enter__(self) -> Counter[str]:
        self.sent.clear()
        world, rank = dist.get_world_size(), dist.get_rank()
        sizes: Mapping[str, Callable[..., int]] = {
            "all_to_all_single": lambda output, input, output_split_sizes=None, input_split_sizes=None, **_: (
                input.nbytes - (input_split_sizes[rank] * input[:1].nbytes if input_split_sizes else input.nbytes // world)
            ),
            "all_gather": lambda tensor_list, tensor, **_: tensor.nbytes * (world - 1),
            "all_gather_into_tensor": lambda output_tensor, input_tensor, **_: input_tensor.nbytes * (world - 1),
            "reduce_scatter": lambda output, input_list, **_: sum(part.nbytes for k, part in enumerate(input_list) if k != rank),
            "reduce_scatter_tensor": lambda output, input, **_: input.nbytes - output.nbytes,
        }
        for name, size in sizes.items():
            self._kept[name] = getattr(dist, name)
            setattr(dist, name, self._counted(name, self._kept[name], size))
        return self.sent

    def _counted(self, name: str, original: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.sent[name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor").replace("_", "-")] += size(
                *args, **kwargs
            )
            return original(*args, **kwargs)

        return call

    def __exit__(self, *error: object) -> None:
        for name, original in self._kept.items():
            setattr(dist, name, original)


def mean_sent(counters: list[Counter[str]]) -> dict[str, float]:
    """Average the bytes by collective over the processes."""
    total = sum(counters, Counter[str]())
    return {name: count / len(counters) for name, count in total.items()}
