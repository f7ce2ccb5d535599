"""A TTEmbeddingBagCollection on several processes: ids out, bags back, as TorchRec's pipelines expect.

B samples of this process, L_f ids of feature f in them, N_f embedding_dim of its table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection, pad_vbe_kjt_lengths
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.distributed.utils import append_prefix
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.streamable import Multistreamable

from comera_rec.ops import check_ids
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig
from comera_rec.recsys.keyed import in_order, repeated, require_features, with_values
from comera_rec.recsys.sharding.optimizers import FusedTTOptimizer, is_fused, new_optimizers
from comera_rec.recsys.sharding.parts import SHARDING_TYPES, Part, Placement, RowShard, RowWise, data_parallel, table_wise
from data_pipeline.errors import UserError

_KERNELS = {  # the one of `TTShardingPlanner`, and those that TorchRec's generators of plans enter by default
    EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value,
    EmbeddingComputeKernel.DENSE.value,
    EmbeddingComputeKernel.FUSED.value,
}


@dataclass
class ShardedContext(Multistreamable):
    """What the input dist records about a batch for the output dist."""

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)
    dense: Any = None
    inverse_indices: tuple[list[str], Tensor] | None = None
    divisors: list[Tensor | None] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors until that stream is done with them."""
        inverse_indices = [] if self.inverse_indices is None else [self.inverse_indices[1]]
        for tensor in (*inverse_indices, *self.divisors):
            if tensor is not None:
                tensor.record_stream(stream)
        for context in self.sharding_contexts:
            context.record_stream(stream)
        if self.dense is not None:
            self.dense.record_stream(stream)


class ShardedTTEmbeddingBagCollection(ShardedModule[KJTList, list[Tensor], KeyedTensor, ShardedContext], FusedOptimizerModule):
    """A `TTEmbeddingBagCollection` as sharded by `TTEmbeddingBagCollectionSharder`.

    Parameters have the names of the unsharded collection. TT tables are sharded data-parallel, table-wise or row-wise, each
    table as the plan says; dense tables by TorchRec. In a state dict a leading core that is divided row-wise is a DTensor.
    Optimizers that were applied in backward are applied anew, without state, to the parameters of shards.

    Args:
        module: the collection; its tables keep their values, unless they are on the meta device.
        plan: parameter sharding of every table, by name.
        env: the processes.
        dense_sharder: shards the dense tables; its `qcomm_codecs_registry` encodes what all tables send.
        device: device of this process.
        module_fqn: the collection's name in the model, for traces.

    Raises:
        ValueError: for a sharding type, a kernel or a process that a TT table can't have, too few slices to divide, or an optimizer
            in backward that can't be kept.
    """

    unsharded_module_type = TTEmbeddingBagCollection

    def __init__(
        self,
        module: TTEmbeddingBagCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        dense_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        group = env.process_group
        assert group is not None, "sharding needs a process group"
        self._keys = module.output_keys()
        self._tables = module.embedding_bag_configs()
        tables = module.tt_configs()
        bags = {config.name: module.tt_bag(config.name) for config in tables}
        for config in tables:
            _require_possible(config.name, plan[config.name], group.size())
        replicated, whole, divided = (
            [config for config in tables if plan[config.name].sharding_type == kind] for kind in SHARDING_TYPES
        )
        owner = {config.name: _owner(plan[config.name]) for config in whole}
        whole.sort(key=lambda config: owner[config.name])
        self._is_pooled, self._is_weighted = module.is_pooled, module.is_weighted()
        self.bounds_check = module.bounds_check
        mode = (dense_sharder.fused_params or {}).get("bounds_check_mode")
        if mode is not None:
            self.bounds_check.mode = mode
        placement = Placement(
            is_weighted=self._is_weighted,
            is_pooled=module.is_pooled,
            device=device,
            group=group,
            codecs=dense_sharder.qcomm_codecs_registry,
        )
        builders = {name: new_optimizers(bag) for name, bag in bags.items()}
        self._parts: list[Part] = []
        for bag in bags.values():
            if not bag.core_0.is_meta:
                bag.to(device)
        if replicated:
            self._parts.append(data_parallel(replicated, bags, placement))
        if whole:
            self._parts.append(table_wise(whole, bags, placement, [owner[config.name] for config in whole]))
        if divided:
            self._parts.append(RowWise(divided, bags, placement))
        for part in self._parts:
            part.give_optimizers_(builders, device)
        self._part_keys = [
            [key for name in dict.fromkeys(config.name for config in part.tables) for key in module.keys_of(name)]
            for part in self._parts
        ]
        # Before the TT tables, as in the unsharded collection: `torchrec.distributed.shard` requires parameters in the same order.
        self.dense_bags: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection | None = None
        if isinstance(module.dense_bags, dense_sharder.module_type):
            dense_plan = EmbeddingModuleShardingPlan({t.name: plan[t.name] for t in self._tables if t not in tables})
            fqn = append_prefix(module_fqn or "", "dense_bags")
            self.dense_bags = dense_sharder.shard(module.dense_bags, dense_plan, env, device, fqn)
            _copy_weights_(self.dense_bags, module.dense_bags, group)  # TorchRec would draw new ones
            self._dense_keys, self._keys_of_batches = module.dense_keys(), list[str]()
        sharded = {name: bag for part in self._parts for name, bag in part.bags.items()}
        self.tt_bags = nn.ModuleDict({config.name: sharded[config.name] for config in tables if config.name in sharded})
        self._input_dists = [part.input_dist for part in self._parts]  # where TorchRec's pipelines look for them
        fused = {name: parameter for name, parameter in self.tt_bags.named_parameters("tt_bags") if is_fused(parameter)}
        optimizers: list[tuple[str, KeyedOptimizer]] = [("", FusedTTOptimizer(fused, self._state_of_whole))] if fused else []
        if self.dense_bags is not None:
            optimizers.append(("dense_bags", self.dense_bags.fused_optimizer))
        self._fused_optimizer = CombinedOptimizer(optimizers)

    def parts(self) -> list[Part]:
        """The TT tables by sharding type."""
        return self._parts

    def tables(self) -> list[TTEmbeddingBagConfig]:
        """The configs of all tables, in order."""
        return self._tables

    def create_context(self) -> ShardedContext:
        return ShardedContext()

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send every id to the process that has its row.

        Raises:
            ValueError: naming table and id, for an id out of range (checked on CPU); for batch sizes that vary by feature without
                inverse indices, if bags are pooled; for a feature that is missing.
        """
        require_features(features, self._tables, is_pooled=self._is_pooled)
        features = self.bounds_check(features)
        if self._is_pooled and not self._is_weighted and features.weights_or_none() is not None:
            features = with_values(features, features.values(), None)  # TorchRec's sharded tables would apply the weights
        if features.variable_stride_per_key():
            if self._is_pooled:
                ctx.inverse_indices = features.inverse_indices_or_none()
            else:
                features = pad_vbe_kjt_lengths(features)
        awaitables: list[Any] = []
        with torch.no_grad():
            of_parts = [part.in_order(features) for part in self._parts]
            for part, part_features in zip(self._parts, of_parts, strict=True):
                _check_ids(part, part_features)  # before any are sent, or other processes would wait for the rest
            for part, part_features in zip(self._parts, of_parts, strict=True):
                ctx.divisors.append(part.divisor(part_features))
                part_features = part.in_rows(part_features)
                awaitables.append(part.input_dist(part_features))
                ctx.sharding_contexts.append(part.context(part_features))
            if self.dense_bags is not None:
                ctx.dense, keys = self.dense_bags.create_context(), list(features.keys())
                self._keys_of_batches = self._keys_of_batches or keys
                is_turned = keys != self._keys_of_batches and sorted(keys) == sorted(self._keys_of_batches)
                if is_turned and features.inverse_indices_or_none() is None:  # TorchRec takes them to be in the first batch's order
                    features = features.permute([keys.index(key) for key in self._keys_of_batches])
                request = self.dense_bags.input_dist(ctx.dense, features)
                ctx.sharding_contexts += ctx.dense.sharding_contexts
                awaitables += request.awaitables
        return KJTListSplitsAwaitable(awaitables, ctx)

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None, ctx: ShardedContext | None = None) -> None:
        """Fetch rows of dense tables that are cached; TT tables are on the device as a whole."""
        if isinstance(self.dense_bags, ShardedEmbeddingBagCollection):
            dense = KJTList(dist_input.features[len(self._parts) :])
            self.dense_bags.prefetch(dense, forward_stream, ctx.dense if ctx else None)

    def compute(self, ctx: ShardedContext, dist_input: KJTList) -> list[Tensor]:
        return [
            part.lookup(features, context)
            for part, features, context in zip(self._parts, dist_input, ctx.sharding_contexts, strict=False)
        ]

    def output_dist(self, ctx: ShardedContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        return _Bags(self, ctx, self._send_back(ctx, output), None)

    def compute_and_output_dist(self, ctx: ShardedContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        dense = None
        if self.dense_bags is not None:  # first, so that its bags travel while the TT tables' cores are multiplied
            dense = self.dense_bags.compute_and_output_dist(ctx.dense, KJTList(input.features[len(self._parts) :]))
        return _Bags(self, ctx, self._send_back(ctx, self.compute(ctx, input)), dense)

    def _send_back(self, ctx: ShardedContext, output: list[Tensor]) -> list[Awaitable[Tensor]]:
        contexts = ctx.sharding_contexts[: len(self._parts)]
        return [part.output_dist(bags, context) for part, bags, context in zip(self._parts, output, contexts, strict=True)]

    def assemble(self, ctx: ShardedContext, pooled: Sequence[Tensor], dense: Any) -> KeyedTensor:
        """Combine what comes back for all tables, in the order and form of the unsharded collection's result."""
        found: dict[str, Tensor] = {}
        for part, keys, bags, divisor, context in zip(
            self._parts, self._part_keys, pooled, ctx.divisors, ctx.sharding_contexts, strict=False
        ):
            of_features = part.by_feature(bags if divisor is None else bags / divisor, context)
            if ctx.inverse_indices is not None:
                of_features = repeated(of_features, ctx.inverse_indices, part.features)
            found |= zip(keys, of_features, strict=True)
        if isinstance(dense, KeyedTensor):
            found |= {self._dense_keys[name]: bags for name, bags in dense.to_dict().items()}
        elif dense is not None:
            found |= {self._dense_keys[name]: rows.values() for name, rows in dense.items()}
        return in_order(self._keys, found, 1 if self._is_pooled else 0)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that data parallelism must not touch: parts, and replicas that are updated in backward."""
        replicas = {replica for part in self._parts for replica in part.replicas() if not is_fused(replica)}
        for name, parameter in self.tt_bags.named_parameters(append_prefix(prefix, "tt_bags")):
            if parameter not in replicas:
                yield name
        if self.dense_bags is not None:
            yield from self.dense_bags.sharded_parameter_names(append_prefix(prefix, "dense_bags"))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers that update tables in backward: those that were applied so, and TorchRec's of dense tables."""
        return self._fused_optimizer

    def _state_of_whole(self, parameter: nn.Parameter, state: Tensor) -> Tensor:
        shards = (bag for bag in self.tt_bags.values() if isinstance(bag, RowShard) and parameter is bag.core_0)
        return next((bag.as_whole(state) for bag in shards if state.dim()), state)


class _Bags(LazyAwaitable[KeyedTensor]):
    def __init__(
        self,
        module: ShardedTTEmbeddingBagCollection,
        ctx: ShardedContext,
        pooled: Sequence[Awaitable[Tensor]],
        dense: LazyAwaitable[Any] | None,
    ) -> None:
        super().__init__()
        self._module, self._ctx, self._pooled, self._dense = module, ctx, pooled, dense

    def _wait_impl(self) -> KeyedTensor:
        dense = None if self._dense is None else self._dense.wait()
        return self._module.assemble(self._ctx, [bags.wait() for bags in self._pooled], dense)


# DistributedDataParallel looks for the tensors of a model's output; without any it would never average gradients.
register_pytree_node(_Bags, lambda bags: ([bags.wait()], None), lambda pooled, _: next(iter(pooled)))


def _require_possible(table: str, sharding: ParameterSharding, world_size: int) -> None:
    """Raise ValueError if a TT table can't be sharded as a plan says."""
    if sharding.sharding_type not in SHARDING_TYPES:
        raise UserError(
            f"table {table!r}: TT tables don't support sharding type {sharding.sharding_type!r}: choose one "
            f"of {', '.join(SHARDING_TYPES)}"
        )
    if sharding.compute_kernel not in _KERNELS:
        raise UserError(f"table {table!r}: TT tables have no compute kernel {sharding.compute_kernel!r}: leave compute_kernel out")
    if sharding.sharding_type == ShardingType.TABLE_WISE.value and not 0 <= _owner(sharding) < world_size:
        raise UserError(
            f"table {table!r}: the plan gives it to process {_owner(sharding)}, but there are {world_size}: choose one "
            f"from 0 to {world_size - 1}"
        )


@torch.no_grad()
def _copy_weights_(sharded: nn.Module, whole: nn.Module, group: dist.ProcessGroup) -> None:
    """Give the parts of dense tables that this process has the values of the whole tables, unless these are on the meta device."""
    values = whole.state_dict()
    for name, weight in sharded.state_dict().items():
        value, parts = values[name], list[tuple[Tensor, Sequence[int]]]()
        if value.is_meta:
            continue
        if isinstance(weight, ShardedTensor):
            parts = [(shard.tensor, shard.metadata.shard_offsets) for shard in weight.local_shards()]
        elif isinstance(weight, DTensor):
            local: Any = weight.to_local()
            parts = list(zip(local.local_shards(), local.local_offsets(), strict=False))  # without shards, it has an offset
        else:  # a replica
            weight.copy_(value)
            dist.broadcast(weight, group=group, group_src=0)
        for part, (row, column) in parts:
            part.copy_(value[row : row + part.shape[0], column : column + part.shape[1]])


def _owner(sharding: ParameterSharding) -> int:
    return (sharding.ranks or [-1])[0]


def _check_ids(part: Part, features: KeyedJaggedTensor) -> None:
    """Check ids before the input dist, which may renumber them from the first row of a shard."""
    if features.device().type == "cpu":
        for config, name in zip(part.tables, part.features, strict=True):
            check_ids(features[name].values(), config.num_embeddings, f"table {config.name!r} (feature {name!r})")
