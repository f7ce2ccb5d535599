"""Steps whose batches go through TorchRec's train pipeline: the next batch's ids are sent while this one is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from comera_rec.data import Batch
from comera_rec.rank import RankScheduler


def is_pipelined(model: nn.Module) -> bool:
    """Whether a model has sharded tables, whose ids can be sent ahead."""
    return any(isinstance(module, ShardedModule) for module in model.modules())


class PipelinedStep:
    """Optimizer steps of a sharded model, with two batches in flight behind the one that is trained.

    Args:
        model: the `DistributedModelParallel` to train.
        loss_of: a batch -> its task loss, computed with that model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[Batch], Tensor],
        optimizer: Optimizer,
        scheduler: RankScheduler | None,
        *,
        clip: Callable[[], object] | None,
        device: torch.device,
    ) -> None:
        self._loss_of, self._optimizer, self._scheduler, self._clip = loss_of, optimizer, scheduler, clip
        self._pipeline = TrainPipelineSparseDist(model, self, device, custom_model_fwd=self._forward)
        self._paused = False

    def __call__(self, batches: Iterator[Batch]) -> Tensor:
        """Take one step; return the task loss, which stays on the device. Raises StopIteration after the last batch."""
        if self._paused:
            self._pipeline.attach()  # which sends the next batch's ids again
            if self._pipeline.contexts:
                self._pipeline.wait_sparse_data_dist(self._pipeline.contexts[0])
            self._paused = False
        loss: Tensor = self._pipeline.progress(batches)
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def pause(self) -> None:
        """Let the model be called, and its parameters change, before the next step, which trains on the batches in flight."""
        self._pipeline.detach()
        self._paused = True

    def zero_grad(self) -> None:
        """Clear gradients; the pipeline calls this before the forward pass."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Clip gradients and update parameters; the pipeline calls this after the backward pass."""
        if self._clip is not None:
            self._clip()
        self._optimizer.step()

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self._loss_of(batch)
        return loss if self._scheduler is None else self._scheduler.loss(loss), loss.detach()
