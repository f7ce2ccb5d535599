"""Replicas, whose gradients are reduced over processes: lookups in them, and data parallelism where their sizes change."""

import gc
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from comera_rec.ops.bags import HotBlock, TableGroup
from comera_rec.ops.bags.updates import averaged_parameters
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig


class ReplicatedLookup(TTEmbeddingBagCollection):
    """Lookup in tables of which every process has a replica, or a shard with replicas of all cores but the leading one.

    A replica's gradient is the mean over processes, for shards the sum. A DistributedDataParallel that has the lookup in its
    forward averages. Otherwise the lookup does: in programs that look up outside of one, as TorchRec's semi-synchronous pipeline,
    and for replicas that optimizers update in backward, which need the gradients earlier.

    Args:
        configs: of the tables.
        group: has the replicas.
        is_weighted, is_pooled: as for the collection.
        divided: whether tables are shards.
    """

    def __init__(
        self,
        configs: Sequence[TTEmbeddingBagConfig],
        group: dist.ProcessGroup,
        *,
        is_weighted: bool,
        is_pooled: bool,
        divided: bool,
    ) -> None:
        super().__init__(configs, is_weighted, "meta", is_pooled=is_pooled)
        self.update_in_backward = False  # gradients are reduced first
        self._group, self._divided = group, divided

    def forward_parameters(self, group: TableGroup) -> TableGroup:
        replicas = [
            replica
            for table in group.tables
            for replica in (*table.cores[self._divided :], *table.diagonals, *itertools.chain.from_iterable(table.hot))
        ]
        averaged = averaged_parameters()
        ours = tuple(id(replica) not in averaged for replica in replicas)
        if not (self._divided or any(ours)):
            return group
        reduced = iter(_Reduced.apply(self._group, self._divided, ours, *replicas))
        return TableGroup(
            [
                table._replace(
                    cores=[*table.cores[: self._divided], *itertools.islice(reduced, len(table.cores) - self._divided)],
                    diagonals=[*itertools.islice(reduced, len(table.diagonals))],
                    hot=[HotBlock(*itertools.islice(reduced, len(block))) for block in table.hot],
                )
                for table in group.tables
            ]
        )


class _Reduced(torch.autograd.Function):
    """Replicas, whose gradients become the means over processes or, of shards, the sums.

    The gradients of those that DistributedDataParallel averages afterwards are only scaled.
    """

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, divided: bool, ours: tuple[bool, ...], *replicas: Tensor):  # type: ignore[no-untyped-def]
        ctx.group, ctx.divided, ctx.ours = group, divided, ours
        return tuple(replica.view_as(replica) for replica in replicas)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[no-untyped-def]
        world_size = ctx.group.size()
        reduced = [gradient * world_size if ctx.divided else gradient for gradient in gradients]
        ours = [k for k, is_ours in enumerate(ctx.ours) if is_ours and ctx.needs_input_grad[3 + k]]
        if ours:
            joined = torch.cat([reduced[k].flatten() for k in ours])
            dist.all_reduce(joined, group=ctx.group)
            for k, part in zip(ours, (joined / world_size).split([reduced[k].numel() for k in ours]), strict=True):
                reduced[k] = part.view(reduced[k].shape)
        return None, None, None, *reduced


def rewrap_data_parallel_(model: DistributedModelParallel) -> DistributedModelParallel:
    """Set up gradient averaging for the present sizes of a model's replicas; call it on every process after `truncate_ranks_`.

    DistributedDataParallel lays out its gradient buckets once, for the sizes it first saw. Gradients are dropped.

    Args:
        model: with `init_data_parallel` done.

    Raises:
        TypeError: for anything but a DistributedModelParallel.

    Returns:
        The model.
    """
    if not isinstance(model, DistributedModelParallel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a DistributedModelParallel. Wrap a model under plain DistributedDataParallel "
            "again yourself: ddp = DistributedDataParallel(ddp.module)"
        )
    wrapped = model._dmp_wrapped_module
    if isinstance(wrapped, DistributedDataParallel):
        model._dmp_wrapped_module = wrapped.module
        del wrapped
        gc.collect()  # the old wrapper's hooks on gradients go with it
        for parameter in model.parameters():
            parameter.grad = None
        model._ddp_wrapped = False
        model.init_data_parallel()
    return model
