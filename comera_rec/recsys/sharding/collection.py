"""A TTEmbeddingBagCollection on several processes: ids out, bags back, as TorchRec's pipelines expect.

B samples of this process, N_f embedding_dim of feature f's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import register_pytree_node
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ShardedModule,
    ShardingEnv,
)
from torchrec.distributed.utils import append_prefix
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.streamable import Multistreamable

from comera_rec.ops import check_ids
from comera_rec.recsys.collection import TTEmbeddingBagCollection, require_keys
from comera_rec.recsys.sharding.fused_optimizer import FusedTTOptimizer, is_fused, new_optimizers
from comera_rec.recsys.sharding.parts import SHARDING_TYPES, DataParallel, Part, RowShard, RowWise, TableWise


@dataclass
class ShardedContext(Multistreamable):
    """What the input dist records about a batch for the output dist."""

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)
    dense: Any = None
    divisors: list[Tensor | None] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors until that stream is done with them."""
        for divisor in self.divisors:
            if divisor is not None:
                divisor.record_stream(stream)
        if self.dense is not None:
            self.dense.record_stream(stream)


class ShardedTTEmbeddingBagCollection(ShardedModule[KJTList, list[Tensor], KeyedTensor, ShardedContext], FusedOptimizerModule):
    """A `TTEmbeddingBagCollection` as sharded by `TTEmbeddingBagCollectionSharder`.

    Parameters have the names of the unsharded collection. TT tables are sharded data-parallel, table-wise or row-wise, each
    table as the plan says; dense tables by TorchRec. In a state dict a leading core that is divided row-wise is a DTensor.
    Optimizers that were applied in backward are applied anew, without state, to the parameters of shards.

    Args:
        module: the collection; its TT tables keep their values, unless they are on the meta device.
        plan: parameter sharding of every table, by name.
        env: the processes.
        dense_sharder: shards the dense tables.
        device: device of this process.
        module_fqn: the collection's name in the model, for traces.

    Raises:
        ValueError: for a sharding type that TT tables do not support, too few slices to divide, or an optimizer in backward that
            can't be kept.
    """

    def __init__(
        self,
        module: TTEmbeddingBagCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        dense_sharder: EmbeddingBagCollectionSharder,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        group = env.process_group
        assert group is not None, "sharding needs a process group"
        self._keys, self._lengths = module.output_keys(), module.output_lengths()
        self._tables = module.embedding_bag_configs()
        tables = module.tt_configs()
        bags = {config.name: module.tt_bag(config.name) for config in tables}
        for config in tables:
            if (kind := plan[config.name].sharding_type) not in SHARDING_TYPES:
                raise ValueError(
                    f"table {config.name!r}: TT tables don't support sharding type {kind!r}: choose one "
                    f"of {', '.join(SHARDING_TYPES)}"
                )
        replicated, whole, divided = (
            [config for config in tables if plan[config.name].sharding_type == kind] for kind in SHARDING_TYPES
        )
        owner = {config.name: plan[config.name].ranks[0] for config in whole}
        whole.sort(key=lambda config: owner[config.name])
        weighted = module.is_weighted()
        builders = {name: new_optimizers(bag) for name, bag in bags.items()}
        self._parts: list[Part] = []
        for bag in bags.values():
            if not bag.core_0.is_meta:
                bag.to(device)
        if replicated:
            self._parts.append(DataParallel(replicated, bags, weighted, group))
        if whole:
            self._parts.append(TableWise(whole, bags, weighted, device, group, [owner[config.name] for config in whole]))
        if divided:
            self._parts.append(RowWise(divided, bags, weighted, device, group))
        for part in self._parts:
            part.give_optimizers_(builders, device)
        self._part_keys = [
            [key for name in dict.fromkeys(config.name for config in part.tables) for key in module.keys_of(name)]
            for part in self._parts
        ]
        sharded = {name: bag for part in self._parts for name, bag in part.bags.items()}
        self.tt_bags = nn.ModuleDict({config.name: sharded[config.name] for config in tables if config.name in sharded})
        # Registered for pipelines, which look for the dists among the submodules.
        self.dists = nn.ModuleList(dist for part in self._parts for dist in (part.input_dist, part.output_dist))
        self.dense_bags: ShardedEmbeddingBagCollection | None = None
        if isinstance(module.dense_bags, EmbeddingBagCollection):
            dense_plan = EmbeddingModuleShardingPlan({t.name: plan[t.name] for t in module.dense_bags.embedding_bag_configs()})
            fqn = append_prefix(module_fqn or "", "dense_bags")
            self.dense_bags = dense_sharder.shard(module.dense_bags, dense_plan, env, device, fqn)
            self._dense_keys = module.dense_keys()
        self._mesh = DeviceMesh.from_group(group, device.type) if divided else None
        fused = {name: parameter for name, parameter in self.tt_bags.named_parameters("tt_bags") if is_fused(parameter)}
        optimizers: list[tuple[str, KeyedOptimizer]] = [("", FusedTTOptimizer(fused, self._state_of_whole))] if fused else []
        if self.dense_bags is not None:
            optimizers.append(("dense_bags", self.dense_bags.fused_optimizer))
        self._fused_optimizer = CombinedOptimizer(optimizers)
        self.register_state_dict_pre_hook(_without_dists)
        self._register_state_dict_hook(_to_dtensors)
        self.register_load_state_dict_pre_hook(_without_dists)
        self.register_load_state_dict_pre_hook(_to_local)

    def create_context(self) -> ShardedContext:
        return ShardedContext()

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send every id to the process that has its row.

        Raises:
            ValueError: naming table and id, for an id out of range (checked on CPU); for batch sizes that vary by feature; for a
                feature that is missing.
        """
        if features.variable_stride_per_key():
            raise ValueError("sharded TT tables take one batch size for all features: give inputs without inverse indices")
        require_keys(features, self._tables)
        keys = features.keys()
        awaitables: list[Any] = []
        with torch.no_grad():
            for part in self._parts:
                part_features = (
                    features if keys == part.features else features.permute([keys.index(name) for name in part.features])
                )
                _check_ids(part, part_features)
                ctx.divisors.append(part.divisor(part_features))
                ctx.sharding_contexts.append(
                    EmbeddingShardingContext(batch_size_per_feature_pre_a2a=part_features.stride_per_key())
                )
                awaitables.append(part.input_dist(part_features))
            if self.dense_bags is not None:
                ctx.dense = self.dense_bags.create_context()
                request = self.dense_bags.input_dist(ctx.dense, features)
                ctx.sharding_contexts += ctx.dense.sharding_contexts
                awaitables += request.awaitables
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: ShardedContext, dist_input: KJTList) -> list[Tensor]:
        return [part.lookup(features) for part, features in zip(self._parts, dist_input, strict=False)]

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

    def assemble(self, ctx: ShardedContext, pooled: Sequence[Tensor], dense: KeyedTensor | None) -> KeyedTensor:
        """Combine the bags of all tables in the order of the unsharded collection, [B, sum of N_f]."""
        columns: dict[str, Tensor] = {}
        for part, keys, bags, divisor in zip(self._parts, self._part_keys, pooled, ctx.divisors, strict=True):
            bags = bags if divisor is None else bags / divisor
            columns |= zip(keys, bags.split([config.embedding_dim for config in part.tables], dim=1), strict=True)
        if dense is not None:
            keys = [self._dense_keys[name] for name in dense.keys()]  # noqa: SIM118  of a KeyedTensor
            columns |= zip(keys, dense.values().split(dense.length_per_key(), dim=1), strict=True)
        return KeyedTensor(self._keys, self._lengths, torch.cat([columns[key] for key in self._keys], dim=1))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that data parallelism must not touch."""
        sharded = {parameter for part in self._parts for parameter in part.sharded_parameters()}
        for name, parameter in self.tt_bags.named_parameters(append_prefix(prefix, "tt_bags")):
            if parameter in sharded:
                yield name
        if self.dense_bags is not None:
            yield from self.dense_bags.sharded_parameter_names(append_prefix(prefix, "dense_bags"))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers that update tables in backward: those that were applied so, and TorchRec's of dense tables."""
        return self._fused_optimizer

    def _state_of_whole(self, parameter: nn.Parameter, state: Tensor) -> Tensor:
        for _, bag in _row_shards(self, ""):
            if parameter is bag.core_0 and state.dim():
                return self._as_whole(bag, state)
        return state

    def _as_whole(self, bag: RowShard, local: Tensor) -> DTensor:
        """Return a tensor with entries for the slices of a leading core, [1, m, n, r] or [m], as a part of the whole core's."""
        dim = min(1, local.dim() - 1)
        size = torch.Size([*local.shape[:dim], bag.whole_shape.row_shape[0], *local.shape[dim + 1 :]])
        stride = torch.empty(size, device="meta").stride()
        part = local.narrow(dim, 0, bag.num_digits)
        return DTensor.from_local(part, self._mesh, [Shard(dim)], run_check=False, shape=size, stride=stride)

    @property
    def unsharded_module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection


class _Bags(LazyAwaitable[KeyedTensor]):
    def __init__(
        self,
        module: ShardedTTEmbeddingBagCollection,
        ctx: ShardedContext,
        pooled: Sequence[Awaitable[Tensor]],
        dense: LazyAwaitable[KeyedTensor] | None,
    ) -> None:
        super().__init__()
        self._module, self._ctx, self._pooled, self._dense = module, ctx, pooled, dense

    def _wait_impl(self) -> KeyedTensor:
        dense = None if self._dense is None else self._dense.wait()
        return self._module.assemble(self._ctx, [bags.wait() for bags in self._pooled], dense)


# DistributedDataParallel looks for the tensors of a model's output; without any it would never average gradients.
register_pytree_node(_Bags, lambda bags: ([bags.wait()], None), lambda pooled, _: next(iter(pooled)))


def _check_ids(part: Part, features: KeyedJaggedTensor) -> None:
    """Check ids before the input dist, which may renumber them from the first row of a shard."""
    if features.device().type == "cpu":
        for config, name in zip(part.tables, part.features, strict=True):
            check_ids(features[name].values(), config.num_embeddings, f"table {config.name!r} (feature {name!r})")


def _row_shards(module: ShardedTTEmbeddingBagCollection, prefix: str) -> Iterator[tuple[str, RowShard]]:
    for name, bag in module.tt_bags.items():
        if isinstance(bag, RowShard):
            yield f"{prefix}tt_bags.{name}.core_0", bag


def _without_dists(module: ShardedTTEmbeddingBagCollection, *args: Any) -> None:
    """Leave the dists' buffers out of state dicts: they follow from the plan and are made at first use."""
    for dist in module.dists.modules():
        dist._non_persistent_buffers_set.update(dist._buffers)


def _to_dtensors(module: ShardedTTEmbeddingBagCollection, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for key, bag in _row_shards(module, prefix):
        state[key] = module._as_whole(bag, state[key])


def divided_like(local: Tensor, entry: DTensor) -> DTensor:
    """Convert a tensor like a row shard's leading core, such as its momenta, to a DTensor placed like that core's `entry`."""
    cut = local[:, : entry.to_local().shape[1]].contiguous()
    placed = DTensor.from_local(cut, entry.device_mesh, entry.placements, run_check=False, shape=entry.shape, stride=entry.stride())
    assert isinstance(placed, DTensor)
    return placed


def padded_to(entry: DTensor, size: Sequence[int]) -> Tensor:
    """Invert `divided_like`: return this process's part, padded with zeros to the size of a shard."""
    local = entry.to_local()
    return torch.cat([local, local.new_zeros(local.shape[0], size[1] - local.shape[1], *local.shape[2:])], dim=1)


def _to_local(module: ShardedTTEmbeddingBagCollection, state: dict[str, Any], prefix: str, *args: Any) -> None:
    for key, bag in _row_shards(module, prefix):
        stored = state.get(key)
        if isinstance(stored, DTensor):
            state[key] = padded_to(stored, (1, bag.shape.row_shape[0]))
