"""Placement of a run's model: on one device, or its tables sharded over several processes and the rest replicated."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import KeyedOptimizer

from comera_rec.distributed import WORLD, launcher_number
from comera_rec.nn import named_tt_modules
from comera_rec.rank.tt_modules import gather_tt_modules
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys.sharding import TTEmbeddingBagCollectionSharder, TTShardingPlanner
from comera_rec.training.config import OptimizerConfig, RunConfig
from comera_rec.training.model import Schema, build_model, build_optimizer, fuse_dense_tables_, materialize_, require_fusible_tables
from comera_rec.training.start import StartingVectors
from comera_rec.training.state import TrainingState
from data_pipeline.errors import UserError

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # cgroups 2, 1


def place(
    config: RunConfig,
    schema: Schema,
    model: nn.Module | None,
    device: torch.device,
    batch_size: int,
    start: StartingVectors | None = None,
) -> TrainingState:
    """Build a model, or take the given one, move or shard it to where it trains, and make its optimizers.

    Args:
        model: the model to place, on one process only; None to build it.
        batch_size: rows per process.
        start: what tables of a new model start from; None for random values.

    Raises:
        ValueError: if a model is given and there are several processes.
        PlannerError: naming a table and what would make it fit, if the tables don't fit.
    """
    if WORLD.several and model is not None:
        raise UserError("a run that continues another one starts on one process: stop it by Ctrl-C, then repeat it on several")
    # On the meta device at first: so initial values don't depend on the number of processes, and dense tables, which may be too
    # large for one process, are made in shards on the processes that keep them.
    whole = materialize_(build_model(config, schema, device="meta"), device) if model is None else model.to(device)
    require_fusible_tables(whole)
    if start:
        start.set_tt_tables_(whole)
    tables: list[KeyedOptimizer]
    if WORLD.several:
        placed = _shard(whole, device, batch_size, config.optimizer)
        module, tables = placed.module, [placed.fused_optimizer]
    else:
        placed = module = whole
        tables = fuse_dense_tables_(whole, config.optimizer.lr_tables, device)
    if start:
        start.set_dense_tables_(module)
    optimizer = build_optimizer(module, config.optimizer)
    return TrainingState(model=placed, module=module, table_optimizers=tables, optimizer=optimizer)


def whole_model(config: RunConfig, schema: Schema, module: nn.Module) -> nn.Module:
    """Return the unsharded model at the present ranks of `module`: on the meta device or, on one process, `module` itself."""
    if not WORLD.several:
        return module
    whole = build_model(config, schema, device="meta")
    summaries = gather_tt_modules(dict(named_tt_modules(module)))
    for name, part in named_tt_modules(whole):
        part.resize_ranks_(summaries[name].shape.ranks)
    return whole


def _shard(model: nn.Module, device: torch.device, batch_size: int, optimizer: OptimizerConfig) -> DistributedModelParallel:
    """Shard the tables of a model that is the same on every process by plan, and replicate the rest.

    TT tables go where `TTShardingPlanner` estimates them cheapest. Dense tables are updated in backward by row-wise Adagrad, each
    whole or divided by rows; TorchRec initializes those on the meta device.
    """
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": optimizer.lr_tables}
    dense_sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    sharders: list[Any] = [TTEmbeddingBagCollectionSharder(dense_sharder), dense_sharder]
    # A replicated dense table would have a dense gradient, and an optimizer different from the others'. In replicas of TT tables,
    # weight decay and Adam's moments also change slices that no batch uses; on CPUs, those of one process stay.
    differ = device.type == "cpu" and (optimizer.name != "adagrad" or optimizer.weight_decay_cores > 0)
    kinds = (EmbeddingBagCollection, TTEmbeddingBagCollection) if differ else EmbeddingBagCollection
    constraints = {
        config.name: ParameterConstraints(sharding_types=["table_wise", "row_wise"])
        for module in model.modules()
        if isinstance(module, kinds)
        for config in module.embedding_bag_configs()
    }
    local_world_size = min(launcher_number("LOCAL_WORLD_SIZE", WORLD.size), WORLD.size)
    if device.type == "cuda":
        room = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory}
    else:
        room = {"ddr_cap": host_memory() // local_world_size}
    topology = Topology(WORLD.size, device.type, local_world_size=local_world_size, **room)
    planner = TTShardingPlanner(topology, batch_size, constraints=constraints)
    plan = planner.collective_plan(model, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def host_memory(limits: Sequence[Path] = _CONTAINER_LIMITS) -> int:
    """Return the bytes of memory of this host, or of the container that limits it."""
    set_limits = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *set_limits])


def device_of(name: str) -> torch.device:
    """Return the device of this process: "cpu", "cuda" (a GPU for each process of a host), or "auto" for a GPU if there is one.

    Raises:
        ValueError: for "cuda" without a GPU, or with fewer GPUs than processes.
    """
    local_process_rank = launcher_number("LOCAL_RANK", 0)
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cuda" and not count:
        raise UserError("training.device is cuda but torch sees no GPU: use training.device=cpu, or install the CUDA build")
    if not count:
        return torch.device("cpu")
    if local_process_rank >= count:
        raise UserError(
            f"{local_process_rank + 1} or more processes share {count} GPUs: launch one per GPU, or set training.device=cpu"
        )
    torch.cuda.set_device(local_process_rank)
    return torch.device("cuda", local_process_rank)


def name_of(device: torch.device) -> str:
    """Name the hardware that results are measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
