"""Replicas, whose gradients are reduced over processes: lookups in them, and data parallelism where their sizes change."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from comera_rec.ops.bags import HotBlock, TableGroup
from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig


class ReplicatedLookup(TTEmbeddingBagCollection):
    """Lookup in tables of which every process has a replica, or a shard with replicas of all cores but the leading one.

    A replica's gradient is the mean over processes, for shards the sum. The lookup reduces it, as TorchRec's replicas of dense
    tables do: so a DistributedDataParallel around the model need not see the lookup, and optimizers may step in backward.

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
        reduced = iter(_Reduced.apply(self._group, self._divided, *replicas))
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
    """Replicas, whose gradients become the means over processes or, of shards, the sums."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, divided: bool, *replicas: Tensor):  # type: ignore[no-untyped-def]
        ctx.group, ctx.divided = group, divided
        return tuple(replica.view_as(replica) for replica in replicas)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[no-untyped-def]
        trained = [gradient for gradient, is_trained in zip(gradients, ctx.needs_input_grad[2:], strict=True) if is_trained]
        joined = torch.cat([gradient.flatten() for gradient in trained])
        dist.all_reduce(joined, group=ctx.group)
        if not ctx.divided:
            joined.div_(ctx.group.size())
        parts = iter(joined.split([gradient.numel() for gradient in trained]))
        reduced = [
            next(parts).view(gradient.shape) if is_trained else None
            for gradient, is_trained in zip(gradients, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *reduced


def rewrap_data_parallel_(model: DistributedModelParallel) -> DistributedModelParallel:
    """Set up gradient averaging for the present sizes of a model's TT layers; call it on every process after `truncate_ranks_`.

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
