"""A training step: batches -> loss -> gradients -> update -> ranks."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from comera_rec.data import Batch
from comera_rec.rank import RankScheduler
from comera_rec.recsys.sharding import rewrap_data_parallel_
from comera_rec.training.capture import CapturedUpdate, CudaRecorder, why_not_captured
from comera_rec.training.config import OptimizerConfig, RunConfig
from comera_rec.training.log import tell
from comera_rec.training.state import TrainingState
from data_pipeline.errors import UserError


class TrainingStep:
    """Takes a run's steps: `step(number, batches)`, with number from 1.

    Attributes:
        update: batch -> its loss; changes the model. On a GPU a CUDA graph, if it can be captured (`training.capture`).
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainingState,
        scheduler: RankScheduler | None,
        *,
        device: torch.device,
        total_steps: int,
        teacher: nn.Module | None = None,
    ) -> None:
        self._config, self._state, self._scheduler, self._teacher = config, state, scheduler, teacher
        self._device, self._total_steps = device, total_steps
        self._rates_vary = config.optimizer.warmup_steps > 0 or config.optimizer.decay > 0
        self._rates = [(group, group["lr"]) for each in state.optimizers for group in each.param_groups]
        weights = torch.tensor(config.training.task_weights or 1.0, device=device)
        self._task_weights = weights / weights.mean()  # with mean 1, so that the price of ranks doesn't depend on their sum
        self.update: Callable[[Batch], Tensor] = self._update
        if device.type == "cuda" and self._is_captured(config.training.capture):
            for group in state.optimizer.param_groups if self._rates_vary else ():  # a graph reads tensors in every step
                group["lr"] = torch.tensor(group["lr"], device=device)
            on_failure = None if config.training.capture is True else _say_why_not_captured
            self.update = CapturedUpdate(self._update, state.optimizers, CudaRecorder(device), on_failure)

    def _is_captured(self, capture: bool | Literal["auto"]) -> bool:
        reason = why_not_captured(self._state.optimizer, self._rates_vary) if capture else None
        if reason and capture is True:
            raise UserError(f"training.capture is true, but {reason}: set training.capture=auto")
        return bool(capture) and reason is None

    def __call__(self, number: int, batches: Iterator[Batch]) -> Tensor:
        """Take a step; return the task loss, which stays on the device."""
        if self._rates_vary:
            factor = rate_factor(self._config.optimizer, number, self._total_steps)
            for group, rate in self._rates:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor
            for table_optimizer in self._state.table_optimizers:
                table_optimizer.step()  # only passes the rate to FBGEMM's tables
        loss = self.update(next(batches).to(self._device, non_blocking=True))
        if self._scheduler is not None and self._scheduler.step():
            self.model_has_changed()
        return loss

    def _update(self, batch: Batch) -> Tensor:
        """Update the model by the gradient of a batch's loss; doesn't wait for the device, so that a graph can capture it."""
        self._state.optimizer.zero_grad()  # to None, so that a graph writes gradients instead of adding to them
        loss = self.loss_of(batch)
        (self._scheduler.loss(loss) if self._scheduler else loss).backward()
        self._state.optimizer.step()
        return loss.detach()

    def loss_of(self, batch: Batch) -> Tensor:
        """Return a batch's mean cross-entropy with its labels, or the teacher's predictions: [B] or [B, L]; weights of rows [B]."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.training.precision != "float32"):
            logits = self._state.model(batch.dense, batch.sparse)
        labels = batch.labels
        if self._teacher is not None:
            with torch.no_grad():
                labels = self._teacher(batch.dense, batch.sparse).sigmoid()
        losses_BL = F.binary_cross_entropy_with_logits(logits.float(), labels.view_as(logits), reduction="none")
        weights = self._task_weights if batch.weights is None else self._task_weights * batch.weights.unsqueeze(1)
        return (losses_BL * weights).mean()

    def model_has_changed(self) -> None:
        """Average gradients of replicas, and capture graphs, for the present sizes; call it after ranks have changed."""
        if isinstance(self._state.model, DistributedModelParallel):
            rewrap_data_parallel_(self._state.model)
        if isinstance(self.update, CapturedUpdate):
            self.update.reset()


def _say_why_not_captured(error: RuntimeError) -> None:
    first_line = str(error).partition("\n")[0]
    tell(f"steps run eagerly, as they can't be captured in a CUDA graph: {first_line}")


def rate_factor(schedule: OptimizerConfig, number: int, total_steps: int) -> float:
    """Return the factor of all learning rates in step `number`, from 1: it rises to 1 over the warmup, and falls at the end.

    It follows from the number alone, so a resumed run has the rates of one that never stopped.
    """
    falling = schedule.decay * total_steps
    end = (total_steps - number + 1) / falling if falling else 1.0
    return max(0.0, min(1.0, number / (schedule.warmup_steps + 1), end))
