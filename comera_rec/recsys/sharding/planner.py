"""TorchRec's planner with TT tables at their true cost.

B samples per process, W processes, L ids per process, N embedding_dim; sizes in bytes, times in ms, as in all of that planner.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from comera_rec.distributed import Processes
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import DTYPES, TTEmbeddingBagConfig
from comera_rec.recsys.sharding.parts import DENSE, SHARDING_TYPES, digits_per_process
from comera_rec.recsys.sharding.sharder import (
    TTEmbeddingBagCollectionSharder,
    TTManagedCollisionEmbeddingBagCollectionSharder,
    managed_path,
)
from comera_rec.tt import TTShape
from data_pipeline.errors import UserError

_FLOPS = {"cpu": 5e7, "cuda": 1e10}  # per ms, for products as small as these; an order of magnitude is enough to compare plans
_GLOO = 2e6  # bytes per ms between processes of CPUs, for which TorchRec's topology has the bandwidth of GPUs' links
_EXCHANGE = {ShardingType.TABLE_WISE.value: 3.0, ShardingType.ROW_WISE.value: 6.0}
"""ms that gloo and Python take for a step's exchanges of ids and bags, however few; charged as if all TT tables shared them."""
_ITEM = 4  # bytes of a float32, the type of bags and of a lookup's workspace whatever the table's type
ADAM_STATES = 2
_BUCKETS = 2  # copies of replicas' gradients that DistributedDataParallel holds while it rebuilds its buckets after the first step
_OURS = (TTEmbeddingBagCollectionSharder, TTManagedCollisionEmbeddingBagCollectionSharder)
_MAX_PROPOSALS = 1000  # rated by the grid search in about a second; the other proposers' plans took at most 3 % longer


class TTShardingPlanner(EmbeddingShardingPlanner):
    """`EmbeddingShardingPlanner` that also places the TT tables of `TTEmbeddingBagCollection`s beside dense tables.

    A TT table takes the storage of its cores, their gradients, the optimizer's states, and the workspace of its lookup; replicas
    also take that of their gradients' buckets. Its time counts the lookup's bytes and multiply-adds, the optimizer's bytes,
    ids and bags sent table-wise and row-wise, and gradients of replicated cores; between CPUs at 2 GB/s at most, and with what an
    exchange takes at least.

    Args:
        topology, batch_size, constraints, and others: as in TorchRec. Of a constraint, `sharding_types` and `pooling_factors` apply
            to TT tables as well, other fields don't; give one pooling factor per feature, or one for all.
        optimizer_states: tensors that the optimizer holds beside each core: 2 for Adam, 1 for Adagrad, 0 for SGD.
        storage_reservation: default 15 % of every device, also of a CPU's memory, for everything but tables.

    Raises:
        ValueError: for an `enumerator` that isn't a `TTEnumerator`; from `plan`, for TT tables without a sharder, or behind feature
            processors.
        PlannerError: from `plan`, if nothing fits, naming the largest tables, their sizes and what to change; if the number
            of pooling factors is neither 1 nor that of the table's features.

    Example:
        >>> topology = Topology(world_size=2, compute_device="cpu")
        >>> plan = TTShardingPlanner(topology, batch_size=1024).plan(model, [TTEmbeddingBagCollectionSharder()])  # doctest: +SKIP
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        constraints: dict[str, ParameterConstraints] | None = None,
        optimizer_states: int = ADAM_STATES,
        **others: Any,
    ) -> None:
        if not isinstance(others.get("enumerator"), TTEnumerator | None):
            raise UserError("the enumerator knows no TT tables: leave it out, or derive it from TTEnumerator")
        others.setdefault("storage_reservation", _Reservation(0.15))
        quick = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
        others.setdefault("proposer", [GridSearchProposer(_MAX_PROPOSALS), *quick])
        super().__init__(topology=topology, batch_size=batch_size, constraints=constraints, **others)
        if "enumerator" not in others:
            self._enumerator = TTEnumerator(self._topology, self._batch_size, constraints, optimizer_states=optimizer_states)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return the sharding plan of a model; see TorchRec."""
        for path, each in module.named_modules():
            inner = each._embedding_bag_collection if isinstance(each, FeatureProcessedEmbeddingBagCollection) else None
            if isinstance(each, TTEmbeddingBagCollection):
                managed_path(path, has_sharder=True)
            if isinstance(inner, TTEmbeddingBagCollection):
                raise UserError(f"{path or 'the model'} has feature processors, which sharded TT tables send no gradients: {DENSE}")
        sharder_of = {each.module_type: each for each in sharders}
        for path, each in module.named_modules():
            sharder = sharder_of.get(type(each))
            has_tt_tables = any(isinstance(part, TTEmbeddingBagCollection) for part in each.modules())
            if sharder and has_tt_tables and not isinstance(sharder, _OURS):
                raise UserError(
                    f"{path or 'the model'} has TT tables, which {type(sharder).__name__} can't shard: leave this sharder out"
                )
        try:
            return super().plan(module, sharders)
        except PlannerError as error:
            if error.error_type not in (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.PARTITION):
                raise
            options = self._enumerator.enumerate(module, sharders)
            room = self._storage_reservation.reserve(self._topology, self._batch_size, module, sharders, self._constraints)
            raise PlannerError(f"{_misfit(options, room)}\n{error}", error.error_type) from None

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on process 0 of a group and return that plan on every process of the group; the default group has all processes.

        If process 0 can't, all raise its error. `sharders` are by default those of TorchRec and `TTEmbeddingBagCollectionSharder`.
        """
        chosen = sharders or [TTEmbeddingBagCollectionSharder(), *get_default_sharders()]
        # TorchRec's version broadcasts from the world's first process, and so hangs for groups without it.
        return Processes(pg).on_first(lambda: self.plan(module, chosen))


def _misfit(options: Sequence[ShardingOption], room: Topology) -> str:
    """Say in a sentence which tables take most memory and what to change, when `room` is what devices have for tables."""
    memory = "hbm" if room.compute_device == "cuda" else "ddr"
    sizes: dict[str, int] = {}  # of a table's largest shard, with the sharding type for which it is smallest
    for option in options:
        size = max(getattr(shard.storage, memory) for shard in option.shards)
        sizes[option.name] = min(size, sizes.get(option.name, size))
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    taken = ", ".join(f"{name!r} takes {sizes[name] / 2**30:.3g} GiB" for name in largest)
    free = min(getattr(device.storage, memory) for device in room.devices)
    batch = options[0].batch_size if options else 1
    return (
        f"the tables don't fit: {taken} of a device even when divided best, and a device has {free / 2**30:.3g} GiB for all of "
        "them: give the largest ones smaller TT ranks and no hot rows, make dense ones TT tables (TTEmbeddingBagConfig with "
        f"tt_ranks), use a batch smaller than {batch}, or plan for more devices than {room.world_size}"
    )


class _Reservation(FixedPercentageStorageReservation):
    """TorchRec's reservation, of memory that isn't a GPU's, too."""

    def reserve(self, topology: Topology, *others: Any, **named: Any) -> Topology:
        reserved: Topology = super().reserve(topology, *others, **named)
        for device in reserved.devices if topology.compute_device != "cuda" else ():
            device.storage.ddr = int((1 - self._percentage) * device.storage.ddr)
        self._last_reserved_topology = reserved
        return reserved


class _DenseManaged(TTManagedCollisionEmbeddingBagCollectionSharder):
    """In TorchRec's enumerator, which only lists options of dense tables."""

    def shardable_parameters(self, module: ManagedCollisionEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        is_tt = isinstance(module._embedding_module, TTEmbeddingBagCollection)
        return {} if is_tt else super().shardable_parameters(module)


class TTEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, with options for TT tables."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        optimizer_states: int = ADAM_STATES,
    ) -> None:
        super().__init__(topology, batch_size, constraints)
        self._topology, self._optimizer_states = topology, optimizer_states

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """List the sharding options of all tables, dense and TT."""
        # To TorchRec a collection is a module like any other, in which it finds the child that holds the dense tables.
        tt_sharders = [sharder for sharder in sharders if isinstance(sharder, TTEmbeddingBagCollectionSharder)]
        other_sharders = [sharder for sharder in sharders if sharder not in tt_sharders]
        collections = {path: each for path, each in module.named_modules() if isinstance(each, TTEmbeddingBagCollection)}
        # TorchRec shards a managed collision module in place of the collection in it.
        managed_sharder = {sharder.module_type: sharder for sharder in sharders}.get(ManagedCollisionEmbeddingBagCollection)
        is_ours = isinstance(managed_sharder, TTManagedCollisionEmbeddingBagCollectionSharder)
        around = {path: managed_path(path, has_sharder=is_ours) for path in collections}
        if collections and not tt_sharders:
            raise UserError(f"the TT tables of {next(iter(collections))!r} have no sharder: add TTEmbeddingBagCollectionSharder()")
        if not tt_sharders:
            return super().enumerate(module, sharders)
        for dense_sharder in (tt_sharders[0].dense_sharder, *map(tt_sharders[0].dense_sharder_of, collections.values())):
            if not any(isinstance(sharder, type(dense_sharder)) for sharder in other_sharders):
                other_sharders.append(dense_sharder)
        if isinstance(managed_sharder, TTManagedCollisionEmbeddingBagCollectionSharder):
            dense_managed = _DenseManaged(managed_sharder.dense_sharder)
            other_sharders = [dense_managed if sharder is managed_sharder else sharder for sharder in other_sharders]
        options = super().enumerate(module, other_sharders)
        for path, collection in collections.items():
            dense_path = f"{path}.dense_bags" if path else "dense_bags"
            for option in options:
                if option.module[0] == dense_path:
                    option._module = (path, collection)
            managed = around[path]
            kinds = SHARDING_TYPES if managed is None else (ShardingType.ROW_WISE.value,)
            for config in collection.tt_configs():
                options += self._options(path if managed is None else managed, collection, config, kinds)
        return options

    def _options(
        self, path: str, collection: TTEmbeddingBagCollection, config: TTEmbeddingBagConfig, kinds: Sequence[str]
    ) -> list[ShardingOption]:
        bag = collection.tt_bag(config.name)
        shape, hot_params = bag.shape, sum(block.shape.num_params for block in bag.hot_blocks())
        rows, cols, world = config.num_embeddings, config.embedding_dim, self._world_size
        constraint = (self._constraints or {}).get(config.name)
        pooling = _pooling_factors(config, constraint)
        allowed_types = (constraint.sharding_types if constraint else None) or kinds
        block = digits_per_process(shape.row_shape, world) * math.prod(shape.row_shape[1:])
        starts = [min(process_rank * block, rows) for process_rank in range(world + 1)]
        shards = {  # (first row, last + 1) of each
            ShardingType.DATA_PARALLEL.value: [(0, rows)] * world,
            ShardingType.TABLE_WISE.value: [(0, rows)],
            ShardingType.ROW_WISE.value: list(itertools.pairwise(starts)) if block else [],
        }
        options = []
        for kind in kinds:
            if kind not in allowed_types or not shards[kind]:
                continue
            ids = sum(pooling) * self._batch_size
            storage, perf = self._estimate(kind, config, shape, hot_params, ids, len(collection.tt_configs()))
            options.append(
                ShardingOption(
                    name=config.name,
                    tensor=nn.Parameter(torch.empty(rows, cols, device="meta")),
                    module=(path, collection),
                    input_lengths=pooling,
                    batch_size=self._batch_size,
                    compute_kernel="customized_kernel",
                    sharding_type=kind,
                    partition_by=get_partition_by_type(kind),
                    shards=[
                        Shard(size=[last - first, cols], offset=[first, 0], storage=storage, perf=perf)
                        for first, last in shards[kind]
                    ],
                    is_pooled=True,
                    feature_names=list(config.feature_names),
                )
            )
        if not options:
            raise PlannerError(
                f"table {config.name!r}: none of the sharding types {list(allowed_types)} suits a TT table on {world} processes: "
                f"allow one of {', '.join(kinds)}"
            )
        return options

    def _estimate(
        self, kind: str, config: TTEmbeddingBagConfig, shape: TTShape, hot_params: int, ids: float, num_tables: int
    ) -> tuple[Storage, Perf]:
        """Estimate the storage and time of a shard when each process has `ids` ids of the table, which is one of `num_tables`."""
        world, item = self._world_size, DTYPES[config.data_type].itemsize
        others, lengths = (world - 1) / world, self._batch_size * len(config.feature_names)
        params, leading = float(shape.num_params + hot_params), float(math.prod(shape.core_shapes[0][1:]))
        bags = float(lengths * config.embedding_dim * _ITEM)
        if kind == ShardingType.DATA_PARALLEL.value:
            sent_ids, sent_bags, lookups, per_process, replicated = 0.0, 0.0, ids, params, params
        elif kind == ShardingType.TABLE_WISE.value:
            # The owner alone sends bags, to all others, and looks up for all.
            sent_ids, sent_bags = (ids + lengths) * 8 * others, bags * (world - 1)
            lookups, per_process, replicated = ids * world, params, 0.0
        else:
            # Every process sends its part of all samples' bags, with lengths for every process, and looks up its share of all ids.
            sent_ids, sent_bags = (ids * others + lengths * (world - 1)) * 8, bags * (world - 1)
            lookups, per_process, replicated = ids, params - leading * others, params - leading
        cut = (shape.order + 1) // 2
        products = math.prod(shape.col_shape) * (shape.bonds[cut] if shape.order > 1 else 1)
        num_bags = lengths * (world if kind == ShardingType.ROW_WISE.value else 1)  # row-wise: parts of all samples'
        workspace = max(lookups, num_bags) * config.embedding_dim * _ITEM
        on_gpu = self._compute_device != "cpu"
        bandwidth = self._topology.hbm_mem_bw if on_gpu else self._topology.ddr_mem_bw
        network = self._topology.inter_host_bw if world > self._local_world_size else self._topology.intra_host_bw
        waiting = 0.0
        if not on_gpu:
            network, waiting = min(network, _GLOO), _EXCHANGE.get(kind, 0.0) / num_tables
        compute = (workspace + per_process * item) / bandwidth + 2.0 * lookups * products / _FLOPS["cuda" if on_gpu else "cpu"]
        perf = Perf(
            fwd_compute=compute,
            fwd_comms=(sent_ids + sent_bags) / network + waiting,
            # The optimizer reads the gradient, and reads and writes all others.
            bwd_compute=2 * compute + per_process * item * (3 + 2 * self._optimizer_states) / bandwidth,
            bwd_comms=(sent_bags + 2 * others * replicated * item) / network,  # ring all-reduce
        )
        size = round(per_process * item * (2 + self._optimizer_states) + replicated * item * _BUCKETS + 2 * workspace)
        return Storage(hbm=size if on_gpu else 0, ddr=0 if on_gpu else size), perf


def _pooling_factors(config: TTEmbeddingBagConfig, constraint: ParameterConstraints | None) -> list[float]:
    """Return the ids per bag, one number for each feature."""
    features = len(config.feature_names)
    factors = list(constraint.pooling_factors) if constraint else [1.0]
    if len(factors) == 1:  # TorchRec's default, whatever the features
        return factors * features
    if len(factors) != features:
        raise PlannerError(
            f"table {config.name!r} has {features} features and its constraint {len(factors)} pooling_factors: give one per "
            "feature, or one for all"
        )
    return factors
