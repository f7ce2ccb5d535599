"""The sharders that tell TorchRec how to shard a TTEmbeddingBagCollection, alone or behind TorchRec's managed collisions.

Managed collisions give every id a row and, later, rows of old ids to new ones. Those of a process number ids within the rows that
it has, so tables are divided row-wise. TorchRec's input dist sends
each id to the process that numbers it, which then looks up its row.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ModuleSharder,
    NoWait,
    ShardedModule,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import EmbeddingTableConfig
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig
from comera_rec.recsys.keyed import require_features
from comera_rec.recsys.sharding.collection import ShardedContext, ShardedTTEmbeddingBagCollection
from comera_rec.recsys.sharding.parts import digits_per_process
from data_pipeline.errors import UserError

MANAGED = "_embedding_module"  # TorchRec's name of the collection in a managed collision module
_Output = tuple[LazyAwaitable[KeyedTensor], Awaitable[KeyedJaggedTensor | None]]


class TTEmbeddingBagCollectionSharder(ModuleSharder[TTEmbeddingBagCollection]):
    """Shards `TTEmbeddingBagCollection` under `DistributedModelParallel`: each TT table data-parallel, table-wise or row-wise.

    Data-parallel replicates a TT table and averages its gradients: no ids or bags are sent. Table-wise gives it to one
    process. Row-wise divides the leading core's slices and replicates the other cores. Dense tables of the same collection go to
    TorchRec's sharder. Plan with `TTShardingPlanner`.

    Args:
        dense_sharder: shards the dense tables; default `EmbeddingBagCollectionSharder()`. Those of a `TTEmbeddingCollection` are
            sharded by an `EmbeddingCollectionSharder` with the same settings. Its `qcomm_codecs_registry` also encodes the bags or
            rows of TT tables, and their gradients, where they are sent; gradients of replicas are averaged as they are.

    Example:
        >>> sharders = [TTEmbeddingBagCollectionSharder(), *get_default_sharders()]  # doctest: +SKIP
        >>> plan = TTShardingPlanner(topology).collective_plan(model, sharders, group)  # doctest: +SKIP
        >>> model = DistributedModelParallel(model, plan=plan, sharders=sharders)  # doctest: +SKIP
    """

    module_type = TTEmbeddingBagCollection

    def __init__(self, dense_sharder: EmbeddingBagCollectionSharder | None = None) -> None:
        self.dense_sharder = dense_sharder or EmbeddingBagCollectionSharder()
        super().__init__(self.dense_sharder.qcomm_codecs_registry)

    def shard(
        self,
        module: TTEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTEmbeddingBagCollection:
        """Shard a collection; `params` has a parameter sharding for each table, dense ones included.

        Raises:
            ValueError: for a table without a parameter sharding, two-dimensional parallelism, or a collection in a managed
                collision module, which another sharder shards; as `ShardedTTEmbeddingBagCollection`.
        """
        managed_path(module_fqn or "")
        if isinstance(env, ShardingEnv2D):
            raise UserError("TT tables can't be sharded over groups of processes that are replicas (DMPCollection): use one group")
        missing = [config.name for config in module.embedding_bag_configs() if config.name not in params]
        if missing:
            raise UserError(f"the sharding plan has no entry for table {missing[0]!r}: make it with TTShardingPlanner")
        device = device or torch.device("cpu")
        return ShardedTTEmbeddingBagCollection(module, params, env, self.dense_sharder_of(module), device, module_fqn)

    def dense_sharder_of(self, module: TTEmbeddingBagCollection) -> Any:
        """Return the sharder of a collection's dense tables; ValueError if these were replaced by something else."""
        sharder: Any = self.dense_sharder
        if not module.is_pooled:
            sharder = EmbeddingCollectionSharder(self.dense_sharder.fused_params, self.qcomm_codecs_registry)
        if not isinstance(module.dense_bags, sharder.module_type | None):
            raise UserError(
                f"the collection's dense tables are a {type(module.dense_bags).__name__}, which isn't sharded: don't fuse them; "
                "the `fused_params` of the dense sharder give them an optimizer"
            )
        return sharder

    def shardable_parameters(self, module: TTEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return a tensor [num_embeddings, embedding_dim] for each table; a TT table's is on the meta device and never formed."""
        tables = {
            config.name: nn.Parameter(torch.empty(config.num_embeddings, config.embedding_dim, device="meta"))
            for config in module.tt_configs()
        }
        dense_sharder: Any = self.dense_sharder_of(module)
        return tables if module.dense_bags is None else tables | dense_sharder.shardable_parameters(module.dense_bags)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Raise ValueError: only planners call this, and TorchRec's would take a TT table for the dense one."""
        raise UserError("TorchRec's planner can't estimate TT tables: make the plan with TTShardingPlanner, and give it as plan=")


def managed_path(path: str, *, has_sharder: bool = False) -> str | None:
    """Return the path of the managed collision module around the collection at `path`; None if there is none.

    Raises:
        ValueError: if nothing can shard that module; `has_sharder` says whether there is a sharder for such modules of TT tables.
    """
    parts = path.split(".")
    if MANAGED not in parts:
        return None
    around = ".".join(parts[: parts.index(MANAGED)])
    named = f"{around or 'the model'} is a managed collision module"
    if parts[-1] != MANAGED:
        raise UserError(f"{named} of sequences, which TorchRec shards only over its own collections: keep its tables dense")
    if not has_sharder:
        raise UserError(f"{named}: give TTManagedCollisionEmbeddingBagCollectionSharder() after TorchRec's sharders")
    return around


@dataclass
class ManagedContext(ShardedContext):
    """What is recorded about a batch: also its ids by number, as this process looks them up."""

    remapped: KJTList | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.remapped is not None:
            self.remapped.record_stream(stream)


class ShardedTTManagedCollisions(ShardedModule[KJTList, list[Tensor], _Output, ManagedContext]):
    """A `ManagedCollisionEmbeddingBagCollection` over TT tables, as sharded by `TTManagedCollisionEmbeddingBagCollectionSharder`.

    A new id that gets the row of an old one finds what the cores have there: their slices belong to other rows as well, and stay.
    Its hot row, if any, and that row's optimizer state where the optimizer was applied in backward, are set to zero.

    Args:
        module: all its tables are TT tables.
        plan, env, dense_sharder, device, module_fqn: as for `ShardedTTEmbeddingBagCollection`.

    Raises:
        ValueError: for a dense table, a table that isn't sharded row-wise or has a row order, too few rows to divide, and ids with
            weights.
    """

    unsharded_module_type = ManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        dense_sharder: EmbeddingBagCollectionSharder,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        collection = module._embedding_module
        assert isinstance(collection, TTEmbeddingBagCollection)
        if collection.is_weighted():
            raise UserError(
                "TorchRec's sharded managed collisions drop the weights of ids: make the collection without is_weighted"
            )
        infos = [_rows_of_processes(collection, config, plan, env.world_size) for config in collection.embedding_bag_configs()]
        rows = RwPooledEmbeddingSharding(infos, env, device)
        fqn = append_prefix(module_fqn or "", MANAGED)
        self._embedding_module = ShardedTTEmbeddingBagCollection(collection, plan, env, dense_sharder, device, fqn)
        [self._part] = self._embedding_module.parts()
        assert rows.feature_names() == self._part.features
        self._managed_collision_collection = ManagedCollisionCollectionSharder().shard(
            module._managed_collision_collection, plan, env=env, device=device, embedding_shardings=[rows]
        )
        self._return_remapped_features = module._return_remapped_features
        self._group = env.process_group

    def create_context(self) -> ManagedContext:
        return ManagedContext()

    def input_dist(self, ctx: ManagedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send every id to the process that numbers it.

        Raises:
            ValueError: for a feature that is missing; for batch sizes that vary by feature without inverse indices, or where
                numbered ids are returned.
        """
        require_features(features, self._embedding_module.tables(), is_pooled=True)
        if features.variable_stride_per_key():
            if self._return_remapped_features:
                raise UserError("return_remapped_features takes one batch size for all features: leave it out, or join no bags")
            ctx.inverse_indices = features.inverse_indices_or_none()
        with torch.no_grad():
            features = self._part.in_order(features)
            ctx.divisors.append(self._part.divisor(features))
        request: Awaitable[Awaitable[KJTList]] = self._managed_collision_collection.input_dist(ctx, features)
        return request

    def compute(self, ctx: ManagedContext, dist_input: KJTList) -> list[Tensor]:
        ctx.remapped = self._managed_collision_collection.compute(ctx, dist_input)
        self._reset_hot_rows(self._managed_collision_collection.evict())
        return self._embedding_module.compute(ctx, ctx.remapped)

    def output_dist(self, ctx: ManagedContext, output: list[Tensor]) -> _Output:
        pooled = self._embedding_module.output_dist(ctx, output)
        if not self._return_remapped_features:
            return pooled, NoWait(None)
        return pooled, self._managed_collision_collection.output_dist(ctx, ctx.remapped)

    def _reset_hot_rows(self, evictions: Mapping[str, Tensor | None]) -> None:
        """Set hot rows of new ids to zero, by table's rows of this process, which may be none; all processes have replicas."""
        for name, evicted in evictions.items():
            table = self._part.bags[name]
            if not table.num_hot_rows:
                continue
            is_new = torch.zeros(table.num_hot_rows, dtype=torch.uint8, device=table.core_0.device)
            if evicted is not None:
                rows = evicted + table.first_row
                is_new[rows[rows < table.num_hot_rows]] = 1
            dist.all_reduce(is_new, dist.ReduceOp.MAX, group=self._group)
            for block in table.hot_blocks():
                core = block.core_0
                of_block = is_new[block.first : block.first + block.num_rows].nonzero().flatten()
                states = [value for each in getattr(core, "_in_backward_optimizers", ()) for value in each.state[core].values()]
                for values in (core.data, *states):  # not seen by autograd, as TorchRec's tables are reset
                    if core.shape[:2] in (values.shape[:2], (1, *values.shape)):  # or row-wise sums
                        values.view(block.num_rows, -1)[of_block] = 0

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters and buffers that data parallelism must not touch."""
        yield from self._embedding_module.sharded_parameter_names(append_prefix(prefix, MANAGED))
        for name, _ in self._managed_collision_collection.named_buffers(append_prefix(prefix, "_managed_collision_collection")):
            yield name


class TTManagedCollisionEmbeddingBagCollectionSharder(ManagedCollisionEmbeddingBagCollectionSharder):
    """Shards `ManagedCollisionEmbeddingBagCollection`s: over TT tables row-wise, others as TorchRec does.

    Give it to planner and model after TorchRec's sharders, because the last sharder of a type is used.

    Args:
        dense_sharder: as for `TTEmbeddingBagCollectionSharder`.

    Example:
        >>> managed = TTManagedCollisionEmbeddingBagCollectionSharder()
        >>> sharders = [TTEmbeddingBagCollectionSharder(), *get_default_sharders(), managed]  # doctest: +SKIP
    """

    def __init__(self, dense_sharder: EmbeddingBagCollectionSharder | None = None) -> None:
        self.dense_sharder = dense_sharder or EmbeddingBagCollectionSharder()
        super().__init__(self.dense_sharder, qcomm_codecs_registry=self.dense_sharder.qcomm_codecs_registry)

    def shardable_parameters(self, module: ManagedCollisionEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return a tensor [num_embeddings, embedding_dim] for each table."""
        if isinstance(module._embedding_module, TTEmbeddingBagCollection):
            return TTEmbeddingBagCollectionSharder(self.dense_sharder).shardable_parameters(module._embedding_module)
        parameters: dict[str, nn.Parameter] = super().shardable_parameters(module)
        return parameters

    def shard(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard a module; see `ShardedTTManagedCollisions`."""
        device = device or torch.device("cpu")
        if isinstance(module._embedding_module, TTEmbeddingBagCollection):
            return ShardedTTManagedCollisions(module, params, env, self.dense_sharder, device, module_fqn)
        return super().shard(module, params, env, device, module_fqn)


def _rows_of_processes(
    collection: TTEmbeddingBagCollection, config: TTEmbeddingBagConfig, plan: EmbeddingModuleShardingPlan, world_size: int
) -> EmbeddingShardingInfo:
    """Tell TorchRec which rows of a table each process has; managed collisions need no more of it, so other fields are equal."""
    if not config.is_tt:
        raise UserError(
            f"table {config.name!r} is dense, in a managed collision module with TT tables, which is sharded only over TT tables: "
            "compress it, too (min_rows), or give dense tables a module of their own"
        )
    if config.name not in plan or plan[config.name].sharding_type != ShardingType.ROW_WISE.value:
        raise UserError(f"table {config.name!r} is in a managed collision module: shard it row_wise")
    bag = collection.tt_bag(config.name)
    if bag.row_order is not None:
        raise UserError(f"table {config.name!r} has a row order, but managed collisions choose the rows of ids: leave it out")
    block = digits_per_process(bag.shape.row_shape, world_size) * math.prod(bag.shape.row_shape[1:])
    if not block or (world_size - 1) * block >= config.num_embeddings:
        raise UserError(
            f"table {config.name!r} can't be divided row-wise among {world_size} processes: give it a larger leading mode"
        )
    table = EmbeddingTableConfig(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=4,
        feature_names=config.feature_names,
        embedding_names=config.feature_names,
    )
    rows = nn.Parameter(torch.empty(config.num_embeddings, table.embedding_dim, device="meta"))
    sharding = row_wise(([block] * world_size, "cpu"))(rows, world_size, world_size, "cpu", ManagedCollisionCollectionSharder())
    return EmbeddingShardingInfo(table, sharding, rows)
