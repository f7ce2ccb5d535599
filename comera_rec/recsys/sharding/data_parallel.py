"""Data parallelism over parameters whose sizes change."""

from __future__ import annotations

import gc

from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel


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
