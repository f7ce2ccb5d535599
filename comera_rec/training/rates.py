"""Learning rates that rise at the start of a run and fall at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer


class LearningRates:
    """Multiplies all rates by a factor that rises linearly to 1 over the warmup, and falls linearly at the end of the run.

    The factor follows from the step number alone, so a resumed run has the rates of one that never stopped.

    Args:
        table_optimizers: optimizers of dense tables, which are updated in the backward pass.
        decay: share of all steps, at the end, over which rates fall.
        as_tensors: hold the optimizer's rates in tensors, which a CUDA graph reads in every step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        table_optimizers: Sequence[KeyedOptimizer],
        *,
        total_steps: int,
        warmup_steps: int = 0,
        decay: float = 0.0,
        as_tensors: bool = False,
    ) -> None:
        self._tables = table_optimizers
        self._groups = [(group, group["lr"]) for each in (optimizer, *table_optimizers) for group in each.param_groups]
        self._total, self._warmup, self._falling = total_steps, warmup_steps, decay * total_steps
        if as_tensors and self.vary:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)

    @property
    def vary(self) -> bool:
        """Whether any step has another rate than the configured one."""
        return self._warmup > 0 or self._falling > 0

    def factor(self, step: int) -> float:
        """Return the factor of a step, counted from 1: above 0, at most 1."""
        rising = step / (self._warmup + 1)
        falling = (self._total - step + 1) / self._falling if self._falling else 1.0
        return max(0.0, min(1.0, rising, falling))

    def set(self, step: int) -> None:
        """Set all rates for a step."""
        if not self.vary:
            return
        for group, rate in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * self.factor(step))
            else:
                group["lr"] = rate * self.factor(step)
        for optimizer in self._tables:
            optimizer.step()  # only passes the rate to FBGEMM's tables
