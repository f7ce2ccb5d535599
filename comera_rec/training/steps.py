"""Optimizer steps of a run: how a batch goes through the model, and at which learning rates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from comera_rec.data import Batch
from comera_rec.distributed import Processes
from comera_rec.rank import RankScheduler
from comera_rec.recsys.sharding import rewrap_data_parallel_
from comera_rec.training.captured_step import CapturedStep
from comera_rec.training.clipping import GradientClipping
from comera_rec.training.config import RunConfig
from comera_rec.training.pipeline import PipelinedStep, is_pipelined
from comera_rec.training.placement import Placed
from comera_rec.training.rates import LearningRates


class Steps:
    """Takes a step's batches, updates the model, and adapts its ranks.

    Sharded tables use TorchRec's pipeline if a step has one part (`training.pipeline`); all else uses the plain loop, on a GPU as
    a CUDA graph if asked for (`training.capture`).

    Attributes:
        is_pipelined: whether batches go through the pipeline.
    """

    def __init__(
        self,
        config: RunConfig,
        placed: Placed,
        optimizer: Optimizer,
        scheduler: RankScheduler | None,
        *,
        processes: Processes,
        device: torch.device,
        total_steps: int,
    ) -> None:
        training = config.training
        self._model, self._scheduler, self._device, self._training = placed.model, scheduler, device, training
        self._rates = LearningRates(
            optimizer, placed.table_optimizers, total_steps=total_steps, warmup_steps=config.optimizer.warmup_steps,
            decay=config.optimizer.decay, as_tensors=training.capture and device.type == "cuda",
        )  # fmt: skip
        self._task_weights = None  # with mean 1, so that the price of ranks doesn't depend on their sum
        if training.task_weights:
            task_weights = torch.tensor(training.task_weights, device=device)
            self._task_weights = task_weights / task_weights.mean()
        limit = training.clip_grad_norm
        clip = None if limit is None else GradientClipping(placed.module, limit, processes)
        self._captured_step = CapturedStep(
            self._loss, optimizer, scheduler, capture=training.capture, clip=clip, accumulation=training.accumulation
        )
        self._pipelined_step = None
        if training.pipeline and training.accumulation == 1 and is_pipelined(placed.model):
            self._pipelined_step = PipelinedStep(placed.model, self._loss_of, optimizer, scheduler, clip=clip, device=device)
        self.is_pipelined = self._pipelined_step is not None

    def take(self, step: int, batches: Iterator[Batch]) -> Tensor:
        """Take step number `step` of the run, from 1; return the task loss, the mean over its parts, which stays on the device."""
        entries = len(self._scheduler.history) if self._scheduler else 0
        self._rates.set(step)
        if self._pipelined_step is not None:
            loss = self._pipelined_step(batches)
        else:
            parts = [next(batches).to(self._device, non_blocking=True) for _ in range(self._training.accumulation)]
            loss = self._captured_step(*(each for part in parts for each in _inputs(part)))
        if self._scheduler and len(self._scheduler.history) > entries:
            self.replicate_anew()
        return loss

    def pause(self) -> None:
        """Allow the model to be called outside of a step, or to be changed, before the next step."""
        if self._pipelined_step is not None:
            self._pipelined_step.pause()

    def replicate_anew(self) -> None:
        """Set up gradient averaging for the present sizes of replicas, after ranks have changed."""
        self.pause()
        if isinstance(self._model, DistributedModelParallel):
            rewrap_data_parallel_(self._model)

    def _loss_of(self, batch: Batch) -> Tensor:
        return self._loss(*_inputs(batch))

    def _loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of a batch: dense [B, I], labels [B] or [B, L], weights of rows [B]."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._training.precision != "float32"):
            logits = self._model(dense, sparse)
        losses_BL = F.binary_cross_entropy_with_logits(logits.float(), labels.view_as(logits), reduction="none")
        if self._task_weights is not None:
            losses_BL = losses_BL * self._task_weights
        if weights is not None:
            losses_BL = losses_BL * weights.unsqueeze(1)
        return losses_BL.mean()


def _inputs(batch: Batch) -> list[Tensor | KeyedJaggedTensor]:
    inputs = [batch.dense, batch.sparse, batch.labels]
    return inputs if batch.weights is None else [*inputs, batch.weights]
