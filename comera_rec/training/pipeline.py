"""Batches of a sharded model whose ids are sent ahead: those of the next batch while this one is trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from comera_rec.data import Batch


def has_sharded_tables(model: nn.Module) -> bool:
    """Whether a model has sharded tables, whose ids can be sent ahead."""
    return any(isinstance(module, ShardedModule) for module in model.modules())


class IdsSentAhead(TrainPipelineSparseDist[Batch, torch.Tensor]):
    """TorchRec's pipeline up to the call of the model, with two batches in flight behind the one that is trained.

    Args:
        model: the `DistributedModelParallel` to train, called once with every batch taken.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, None, device)  # the caller has the optimizer
        model.register_forward_hook(lambda *_: self._send_ids())

    def take(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, on the device; start to send the ids of the one after it, and to copy a third."""
        if not self._model_attached:
            self.attach()  # which sends the next batch's ids again
            self._send_ids()
        self.fill_pipeline(batches)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        self._wait_for_batch()
        if len(self.batches) > 1:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        self.enqueue_batch(batches)
        self.contexts.popleft()
        batch = self.batches.popleft()
        assert batch is not None
        return batch

    def pause(self) -> None:
        """Let the model be called, and its parameters change, before the next `take`, which returns the next batch in flight."""
        self.detach()

    def _send_ids(self) -> None:
        """Exchange the ids of the next batch, once all processes know their number."""
        if self._model_attached and self.contexts:
            self.wait_sparse_data_dist(self.contexts[0])
