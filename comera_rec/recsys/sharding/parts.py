"""The tables of a collection with the same sharding type: where their ids go, the lookup there, and how the bags come back.

Ids and bags travel by TorchRec's input and output dists. B samples of this process, L_f ids of feature f in them, N_f embedding_dim
of its table; W processes; the k-th core has m_k slices, one per row digit. Where a collection doesn't pool, rows come back instead
of bags: [sum of L_f, N] instead of [B, sum of N_f].
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist, DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwSparseFeaturesDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist, TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from comera_rec.nn import TTEmbeddingBag
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig
from comera_rec.recsys.keyed import with_values
from comera_rec.recsys.sharding.optimizers import OptimizerBuilders, apply_optimizers_
from comera_rec.recsys.sharding.replicas import ReplicatedLookup
from comera_rec.tt import TTShape
from data_pipeline.errors import UserError

DENSE = "keep tables behind feature processors dense"
SHARDING_TYPES = (ShardingType.DATA_PARALLEL.value, ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What the parts of a collection have in common."""

    is_weighted: bool
    is_pooled: bool
    device: torch.device
    group: dist.ProcessGroup
    codecs: dict[str, QuantizedCommCodecs] | None
    """How bags or rows, and their gradients, are encoded to be sent, by TorchRec's name of the collective; default as they are."""


class Part(nn.Module):
    """Tables of one sharding type.

    Attributes:
        features: features of all the tables, in the order of `input_dist`; two tables may share one.
        tables: config of each feature's table, in the same order.
        bags: the TT tables this process holds, whole or a shard of each, by table.
        input_dist: KeyedJaggedTensor of the features -> awaitable of an awaitable of what this process looks up.
        output_dist: (bags, sharding context) -> awaitable of [B, sum of N_f], for the samples of this process.
    """

    def __init__(
        self,
        configs: Sequence[TTEmbeddingBagConfig],
        bags: Mapping[str, TTEmbeddingBag],
        placement: Placement,
        input_dist: nn.Module,
        output_dist: BaseEmbeddingDist[Any, Tensor, Tensor],
        *,
        local: Sequence[TTEmbeddingBagConfig] | None = None,
        replicated_over: dist.ProcessGroup | None = None,
        divided: bool = False,
    ) -> None:
        super().__init__()
        self.features = [feature for config in configs for feature in config.feature_names]
        self.tables = [config for config in configs for _ in config.feature_names]
        self.bags = bags
        self.is_pooled, self.is_weighted = placement.is_pooled, placement.is_weighted
        self.input_dist = input_dist
        self.output_dist = output_dist
        self._replicated_over = replicated_over
        # A feature that tables share gets a name for each table, because ids may count from the first row of different shards.
        local = [
            config.with_changes(feature_names=[f"{config.name}/{feature}" for feature in config.feature_names])
            for config in (configs if local is None else local)
        ]
        self._local_features = [feature for config in local for feature in config.feature_names]
        # In a list, so that parameters are registered once, under the names of the unsharded collection.
        self._lookup: list[TTEmbeddingBagCollection] = []
        if local:
            kind = {"is_weighted": placement.is_weighted, "is_pooled": placement.is_pooled}
            if replicated_over is None:
                lookup = TTEmbeddingBagCollection(local, device="meta", **kind)
            else:
                lookup = ReplicatedLookup(local, placement.group, divided=divided, **kind)
            lookup.tt_bags.update(bags)
            self._lookup.append(lookup)

    def in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the part's features in their order.

        Raises:
            ValueError: for weights that need a gradient, which isn't sent back.
        """
        if self.is_weighted and features.weights().requires_grad:
            raise UserError(f"the weights of ids need a gradient, which sharded TT tables don't send back: {DENSE}")
        keys = features.keys()
        return features if keys == self.features else features.permute([keys.index(name) for name in self.features])

    def context(self, features: KeyedJaggedTensor) -> EmbeddingShardingContext:
        """Return what the output dist has to know about a batch; call it after `input_dist`."""
        if self.is_pooled:
            return EmbeddingShardingContext(
                batch_size_per_feature_pre_a2a=features.stride_per_key(),
                variable_batch_per_feature=features.variable_stride_per_key(),
            )
        order = getattr(self.input_dist, "unbucketize_permute_tensor", None)
        return SequenceShardingContext(features_before_input_dist=features, unbucketize_permute_tensor=order)

    def lookup(self, features: KeyedJaggedTensor, context: EmbeddingShardingContext) -> Tensor:
        """[B, sum of N_f] bags of the ids that this process was sent.

        If batch sizes vary by feature, [sum of B_f * N_f], process by process, as TorchRec's output dists expect.
        """
        if not self.is_pooled:
            assert isinstance(context, SequenceShardingContext)
            context.lengths_after_input_dist = features.lengths().view(len(features.keys()), features.stride())
        varies = context.variable_batch_per_feature
        strides = features.stride_per_key_per_rank() if varies else None
        size = [features.stride(), 0] if self.is_pooled else [0, self.tables[0].embedding_dim]
        found = torch.empty([0] if varies else size, device=features.device())
        for lookup in self._lookup:
            ids, weights, lengths = features.values(), features.weights_or_none(), features.lengths()
            batch = KeyedJaggedTensor(self._local_features, ids, weights, lengths, stride_per_key_per_rank=strides)
            if strides is None:
                found = lookup(batch).values()
            else:
                of_features = [bags.split(sizes) for bags, sizes in zip(lookup.different_bags(batch), strides, strict=True)]
                found = torch.cat([bags.flatten() for of_process in zip(*of_features, strict=True) for bags in of_process])
        # Without a table, or with frozen ones alone, a process still takes part in sending bags and their gradients.
        return found.requires_grad_() if self._replicated_over is None and torch.is_grad_enabled() else found

    def by_feature(self, bags: Tensor, context: EmbeddingShardingContext) -> Sequence[Tensor]:
        """Split what comes back by feature: [B, N_f] or [B_f, N_f] bags, or [L_f, N] rows, of each."""
        if not self.is_pooled:
            assert isinstance(context, SequenceShardingContext)
            assert context.features_before_input_dist is not None
            return bags.split(context.features_before_input_dist.length_per_key())
        dims = [config.embedding_dim for config in self.tables]
        if not context.variable_batch_per_feature:
            return bags.split(dims, dim=1)
        parts = bags.split([size * dim for size, dim in zip(context.batch_size_per_feature_pre_a2a, dims, strict=True)])
        return [part.view(-1, dim) for part, dim in zip(parts, dims, strict=True)]

    def give_optimizers_(self, builders: Mapping[str, OptimizerBuilders], device: torch.device) -> None:
        """Give parameters their values, if they are on the meta device, and the optimizers in backward of the whole tables."""
        for name, bag in self.bags.items():
            if bag.core_0.is_meta:
                bag.to_empty(device=device)
                bag.on_meta = ()  # their optimizers are in `builders`
                bag.reset_parameters()
            apply_optimizers_(bag, builders[name], in_lookup=self._replicated_over is None)
        for replica in self.replicas():
            values = replica.detach().contiguous()
            dist.broadcast(values, group=self._replicated_over, group_src=0)
            with torch.no_grad():
                replica.copy_(values)
        if self._replicated_over is not None:
            for bag in self.bags.values():
                _share_order_(bag, self._replicated_over, device)

    def replicas(self) -> list[nn.Parameter]:
        """Parameters that every process holds, in the same order on each."""
        if self._replicated_over is None:
            return []
        divided = {bag.core_0 for bag in self.bags.values() if isinstance(bag, RowShard)}
        return [parameter for bag in self.bags.values() for parameter in bag.parameters() if parameter not in divided]

    def divisor(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the divisors of the bags that come back, in their shape; None if they need no division."""
        return None

    def in_rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replace ids by what `input_dist` sends: rows, where it depends on them which process looks them up."""
        return features


def _share_order_(bag: TTEmbeddingBag, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give a table the row order that process 0 has, or none."""
    has_order = torch.tensor(bag.row_order is not None, dtype=torch.int32, device=device)
    dist.broadcast(has_order, group=group, group_src=0)
    order = bag.row_order
    if has_order:
        rows = bag.dense_params // bag.num_cols
        order = torch.empty(rows, dtype=torch.int32, device=device) if order is None else order.to(device)
        dist.broadcast(order, group=group, group_src=0)
    bag.row_order = order if has_order else None


def data_parallel(configs: Sequence[TTEmbeddingBagConfig], bags: Mapping[str, TTEmbeddingBag], placement: Placement) -> Part:
    """Give every process a replica of each table, which looks up the ids of its samples: gradients are sent, bags aren't."""
    replicas = {config.name: bags[config.name] for config in configs}
    output_dist = DpPooledEmbeddingDist() if placement.is_pooled else DpSequenceEmbeddingDist()
    return Part(configs, replicas, placement, DpSparseFeaturesDist(), output_dist, replicated_over=placement.group)


def table_wise(
    configs: Sequence[TTEmbeddingBagConfig], bags: Mapping[str, TTEmbeddingBag], placement: Placement, owners: Sequence[int]
) -> Part:
    """Give each table to one process, which looks up the ids of all processes' samples.

    Args:
        configs: the tables, in the order of their owners.
        bags, placement: as for `Part`.
        owners: process rank of each table's owner.
    """
    group, device = placement.group, placement.device
    by_process = [
        [config for config, owner in zip(configs, owners, strict=True) if owner == process_rank]
        for process_rank in range(group.size())
    ]
    dims = [[config.embedding_dim for config in placed for _ in config.feature_names] for placed in by_process]
    features = [len(dim) for dim in dims]
    local = by_process[group.rank()]
    output_dist: BaseEmbeddingDist[Any, Tensor, Tensor]
    if placement.is_pooled:
        output_dist = TwPooledEmbeddingDist(group, [sum(dim) for dim in dims], dims, device, qcomm_codecs_registry=placement.codecs)
        # Otherwise, the first batch would decide whether batch sizes may vary by feature.
        output_dist._create_output_dist_module(EmbeddingShardingContext(variable_batch_per_feature=True))
    else:
        output_dist = TwSequenceEmbeddingDist(group, features, device, placement.codecs)
    return Part(
        configs,
        {config.name: bags[config.name] for config in local},
        placement,
        TwSparseFeaturesDist(group, features),
        output_dist,
        local=local,
    )


class RowWise(Part):
    """The leading core's slices are divided among the processes; the other cores are replicas.

    A process looks up the rows of its slices for the samples of all processes. Partial bags are summed on their way back; a row
    that isn't pooled comes from one process.
    """

    def __init__(
        self,
        configs: Sequence[TTEmbeddingBagConfig],
        bags: Mapping[str, TTEmbeddingBag],
        placement: Placement,
    ) -> None:
        group, device = placement.group, placement.device
        shards: dict[str, TTEmbeddingBag] = {config.name: RowShard(bags[config.name], group, device) for config in configs}
        local = [
            config.with_changes(
                num_embeddings=shards[config.name].num_embeddings,
                shape=shards[config.name].shape,
                tt_ranks=None,
                hot_rows=(),  # shards have replicas of the whole table's hot rows
                pooling=PoolingType.SUM,  # `divisor` turns complete sums into means
            )
            for config in configs
        ]
        dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        super().__init__(
            configs,
            shards,
            placement,
            RwSparseFeaturesDist(
                group,
                len(dims),
                [group.size() * config.num_embeddings for config in local for _ in config.feature_names],
                device=device,
                is_sequence=not placement.is_pooled,
            ),
            RowWiseOutputDist(group, dims, placement.codecs)
            if placement.is_pooled
            else RwSequenceEmbeddingDist(group, len(dims), device, placement.codecs),
            local=local,
            replicated_over=group,
            divided=True,
        )

    def in_rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        orders = [self.bags[config.name].row_order for config in self.tables]
        if all(order is None for order in orders):
            return features
        ids = features.values().split(features.length_per_key())
        rows = [each if order is None else order[each.long()].to(each.dtype) for each, order in zip(ids, orders, strict=True)]
        return with_values(features, torch.cat(rows), features.weights_or_none())

    def divisor(self, features: KeyedJaggedTensor) -> Tensor | None:
        is_mean = [config.pooling == PoolingType.MEAN for config in self.tables]
        if not any(is_mean):
            return None
        dims = [config.embedding_dim for config in self.tables]
        numbers = (is_mean, dims, features.stride_per_key())
        is_mean_F, dims_F, sizes_F = (torch.tensor(each, device=features.device()) for each in numbers)
        divisors = torch.where(is_mean_F.repeat_interleave(sizes_F), features.lengths().flatten().clamp(min=1), 1)
        if features.variable_stride_per_key():
            return divisors.repeat_interleave(dims_F.repeat_interleave(sizes_F))
        return divisors.view(len(dims), -1).repeat_interleave(dims_F, 0).T


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """TorchRec's output dist; gloo can't scatter batches of different sizes, so there each is padded to the largest, then cut.

    Where batch sizes vary by feature, each number is scattered like a bag of one dimension.
    """

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Awaitable[Tensor]:
        sizes = sharding_ctx.batch_size_per_rank if sharding_ctx else []
        varies = sharding_ctx is not None and sharding_ctx.variable_batch_per_feature
        if sharding_ctx and varies:
            sizes = [sum(map(mul, each, self._embedding_dims)) for each in sharding_ctx.batch_size_per_rank_per_feature]
            sharding_ctx, local_embs = EmbeddingShardingContext(batch_size_per_rank=sizes), local_embs[:, None]
        bags: Awaitable[Tensor]
        if len(set(sizes)) < 2 or dist.get_backend(self._pg) != dist.Backend.GLOO:
            bags = super().forward(local_embs, sharding_ctx)
        else:
            largest, size = max(sizes), sizes[dist.get_rank(self._pg)]
            bags = super().forward(torch.cat([F.pad(part, (0, 0, 0, largest - len(part))) for part in local_embs.split(sizes)]))
            bags.callbacks.append(lambda whole: whole[:size])
        if varies:
            bags.callbacks.append(torch.flatten)
        return bags


class RowShard(TTEmbeddingBag):
    """The rows of a table that one process has: those whose leading digit is in its range. Ids count from the first of them.

    In a state dict, the leading core is a DTensor.

    Args:
        bag: the whole table, whose values are copied.
        group: the processes among which the table is divided, in order.

    Raises:
        ValueError: if there are not enough leading digits for all processes.
    """

    lookup_order = None  # ids arrive as rows: see `RowWise.in_rows`

    def __init__(self, bag: TTEmbeddingBag, group: dist.ProcessGroup, device: torch.device) -> None:
        first, *others = bag.shape.row_shape
        process_rank, world_size = group.rank(), group.size()
        digits = digits_per_process(bag.shape.row_shape, world_size)
        if not digits:
            raise UserError(
                f"table {bag.name!r} can't be divided row-wise among {world_size} processes: its leading core has {first} slices; "
                "shard it data_parallel or table_wise, or give it a shape with a larger leading mode"
            )
        shape = replace(bag.shape, row_shape=(digits, *others))
        super().__init__(
            shape.num_rows,
            bag.embedding_dim,
            shape=shape,
            mode="sum",
            include_last_offset=True,
            name=bag.name,
            device=bag.core_0.device,
            dtype=bag.core_0.dtype,
        )
        self.std = bag.std
        self._whole, self._whole_rows, self._first_digit = bag.shape, bag.num_embeddings, process_rank * digits
        self._mesh = DeviceMesh.from_group(group, device.type)
        self.num_digits = max(0, min(digits, first - process_rank * digits))
        self.first_row = self._first_digit * math.prod(others)
        self.hot_rows = copy.deepcopy(bag.hot_rows)  # replicas, like all cores but the first
        self.row_order = None if bag.row_order is None else bag.row_order.clone()  # of the whole table
        local, whole = [*self.cores(), *self.rank_parameters()], [*bag.cores(), *bag.rank_parameters()]
        for parameter, value in zip(local, whole, strict=True):
            parameter.requires_grad_(value.requires_grad)
        if bag.core_0.is_meta:
            return
        with torch.no_grad():
            for parameter, value in zip(local[1:], whole[1:], strict=True):
                parameter.copy_(value)
            self.core_0.copy_(self.part_of(bag.core_0, "core_0"))
        self.to(device)

    def as_whole(self, local: Tensor) -> DTensor:
        """Return a tensor with entries for the slices of a leading core, [1, m, n, r] or [m], as a part of the whole core's."""
        dim = min(1, local.dim() - 1)
        size = torch.Size([*local.shape[:dim], self._whole.row_shape[0], *local.shape[dim + 1 :]])
        stride = torch.empty(size, device="meta").stride()
        part = local.narrow(dim, 0, self.num_digits)
        return DTensor.from_local(part, self._mesh, [Shard(dim)], run_check=False, shape=size, stride=stride)

    def part_of(self, whole: Tensor, name: str) -> Tensor:
        """Return this process's part of a tensor like the whole leading core, or of its DTensor, with zeros to the shard's size.

        Raises:
            ValueError: for a tensor of other sizes, or divided in another way.
        """
        local = whole.to_local() if isinstance(whole, DTensor) else whole[:, self._first_digit :][:, : self.num_digits]
        if (whole.shape[1], local.shape[1]) != (self._whole.row_shape[0], self.num_digits):
            raise UserError(
                f"size mismatch for {name}: it has {whole.shape[1]} leading slices, {local.shape[1]} of them here, and the table "
                f"{self._whole.row_shape[0]} and {self.num_digits}: load states of other processes by torch.distributed.checkpoint"
            )
        return F.pad(local, (0, 0, 0, 0, 0, self.core_0.shape[1] - local.shape[1]))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}core_0"] = self.as_whole(destination[f"{prefix}core_0"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        core = state_dict.get(f"{prefix}core_0")
        if isinstance(core, DTensor) or (isinstance(core, Tensor) and core.shape[1:2] == self._whole.row_shape[:1]):
            state_dict = {**state_dict, f"{prefix}core_0": self.part_of(core, f"{prefix}core_0")}
        super()._load_from_state_dict(state_dict, prefix, *others)

    @property
    def whole_shape(self) -> TTShape:
        return self._whole.with_ranks(self.shape.ranks)

    @property
    def dense_params(self) -> int:
        return self._whole_rows * self.num_cols


def digits_per_process(row_shape: Sequence[int], world_size: int) -> int:
    """Leading digits of a process in row-wise sharding (the last may have fewer); 0 if a process would have none."""
    digits = -(-row_shape[0] // world_size)
    return digits if (world_size - 1) * digits < row_shape[0] else 0
