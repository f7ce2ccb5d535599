"""The processes of a run: how many, which one this is, and a model sharded over them.

A launcher such as torchrun starts them and tells them by environment variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints

from comera_rec.rank.tt_modules import max_over_processes, mean_over_processes, on_several_processes
from comera_rec.recsys.sharding import TTEmbeddingBagCollectionSharder, TTShardingPlanner

Value = TypeVar("Value")


def on_first(act: Callable[[], Value]) -> Value:
    """Let the first process act for all: what it returns or raises, every process returns or raises, so that none waits for it."""
    if not on_several_processes():
        return act()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except Exception as error:  # the others are waiting, whatever it is
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    value: Value = outcome[0]
    return value


class Processes:
    """This process among those of the run; where there are several, all agree by the methods here.

    Args:
        device: "cpu", "cuda" (a GPU for each process of a host), or "auto" for a GPU where there is one.

    Raises:
        ValueError: for "cuda" without a GPU, or with fewer GPUs than processes; if the launcher's variables are not all there.
    """

    def __init__(self, device: str) -> None:
        self.rank, self.world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        self.local_world_size = _number("LOCAL_WORLD_SIZE", self.world_size)
        self.device = _device(device, _number("LOCAL_RANK", 0))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.several and not dist.is_initialized():
            missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise ValueError(
                    f"WORLD_SIZE is {self.world_size} but {', '.join(missing)} not set: launch with torchrun, or unset it"
                )
            # A launcher that starts all anew keeps its store, and with it the addresses of the processes that are gone.
            store, rank, world_size = next(dist.rendezvous("env://"))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.PrefixStore(f"attempt_{attempt}", store), rank=rank, world_size=world_size)

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes and prints for all."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.max(float(flag)))

    def max(self, value: float) -> float:
        """The largest of all."""
        return max_over_processes(value)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes, entry by entry."""
        return mean_over_processes(values)

    def leave(self) -> None:
        """Wait for the others and part from them: a process that just exits may be aborted by its threads of communication."""
        if self.several and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def shard(self, model: nn.Module, batch_size: int, lr_tables: float) -> DistributedModelParallel:
        """Place the tables of a model by plan, and replicate the rest.

        Trains go where `TTShardingPlanner` finds them cheapest. Dense tables are updated in the backward pass by rowwise Adagrad,
        each whole or divided by rows; TorchRec gives them new values if they are on the meta device.

        Args:
            model: the same on every process.
            batch_size: rows of a process.
            lr_tables: learning rate of dense tables.

        Raises:
            PlannerError: naming a table and what would make it fit, if the tables don't fit.
        """
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr_tables}
        dense_sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        sharders: list[Any] = [TTEmbeddingBagCollectionSharder(dense_sharder), dense_sharder]
        # A replicated dense table would have a dense gradient, and another optimizer than the others.
        constraints = {
            config.name: ParameterConstraints(sharding_types=["table_wise", "row_wise"])
            for module in model.modules()
            if isinstance(module, EmbeddingBagCollection)
            for config in module.embedding_bag_configs()
        }
        topology = Topology(self.world_size, self.device.type, local_world_size=self.local_world_size, **_room(self))
        planner = TTShardingPlanner(topology, batch_size, constraints=constraints)
        group = dist.group.WORLD
        assert group is not None
        plan = planner.collective_plan(model, sharders, group)
        return DistributedModelParallel(model, device=self.device, plan=plan, sharders=sharders)


def _room(processes: Processes) -> dict[str, int]:
    """Bytes of memory that a process may fill, by the planner's names."""
    if processes.device.type == "cuda":
        return {"hbm_cap": torch.cuda.get_device_properties(processes.device).total_memory}
    return {"ddr_cap": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes.local_world_size}


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise ValueError(f"the environment variable {variable} is {text!r}: launch with torchrun, or unset it")
    return int(text)


def _device(name: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cuda" and not count:
        raise ValueError("training.device is cuda but torch sees no GPU: use training.device=cpu, or install the CUDA build")
    if not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(f"{local_rank + 1} processes or more share {count} GPUs: launch one process a GPU, or training.device=cpu")
    return torch.device("cuda", local_rank)


def available_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
