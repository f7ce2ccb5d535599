"""Objectives of the stages of rank-adaptive training, and the size that TT modules may have at each point of a stage.

L task loss, S size of all TT modules relative to that at the start of the stage, L0 and S0 their targets. A new
objective needs a subclass of `Objective` and a line in `RankScheduler._stage_objective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comera_rec.nn import TTModule
from comera_rec.rank.config import RankConfig
from comera_rec.rank.penalty import core_norm, size_surrogate


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A stage's objective, here the task loss alone, at any size; it has no mutable state.

    Attributes:
        config: its settings.
        reference: parameters of all TT modules at the start of the stage.
        num_cores: cores of all TT modules.
        target: S0, in the late stage.
        target_loss: L0, in the late stage.
        elsewhere: size surrogate of the TT modules of other processes.
    """

    config: RankConfig
    reference: int
    num_cores: int
    target: float = 1.0
    target_loss: float | None = None
    elsewhere: Tensor | float = 0.0

    @property
    def threshold(self) -> float:
        """Ranks with |D| below it are truncated; 0 truncates none."""
        return 0.0

    def loss(self, task_loss: Tensor, modules: Sequence[TTModule]) -> tuple[Tensor, str | Tensor]:
        """Return the scalar to minimize, and the part that dominates it: "loss" or "size", or a tensor with 0 or 1 for these."""
        return task_loss, "loss"

    def ceiling(self, progress: float) -> float | None:
        """Return the largest size allowed at a progress of 0 to 1, relative to the start of the stage; None for any size."""
        return None


class Price(Objective):
    """L + gamma S + beta |G|^2: linear scalarization, CoMERA section 3.2 (arXiv 2405.14377)."""

    @property
    def threshold(self) -> float:
        """See `RankConfig`."""
        return self.config.threshold

    def loss(self, task_loss: Tensor, modules: Sequence[TTModule]) -> tuple[Tensor, str | Tensor]:
        """See the class."""
        gamma = self.config.gamma
        total = task_loss + gamma * size_surrogate(modules) / self.reference if gamma else task_loss
        return self._with_norm(total, modules), "loss"

    def _with_norm(self, total: Tensor, modules: Sequence[TTModule]) -> Tensor:
        return total + self.config.beta * core_norm(modules, self.num_cores) if self.config.beta else total


class Achievement(Price):
    """max{w_loss (L - L0), w_size (S - S0)} + rho (L + S) + beta |G|^2: achievement scalarization, CoMERA eq. 10.

    S is the surrogate, and only `threshold` removes ranks, so whether the final size is S0 depends on the weights, as in the paper.
    """

    def loss(self, task_loss: Tensor, modules: Sequence[TTModule]) -> tuple[Tensor, str | Tensor]:
        """See the class."""
        assert self.target_loss is not None, "the early stage sets it"
        config, size = self.config, (size_surrogate(modules) + self.elsewhere) / self.reference
        gaps = torch.stack([config.w_loss * (task_loss - self.target_loss), config.w_size * (size - self.target)])
        return self._with_norm(gaps.max() + config.rho * (task_loss + size), modules), gaps.detach().argmax()


class Budget(Objective):
    """L alone, under a ceiling that falls to the target: fast at first, while much is redundant, then ever more slowly.

    S(t) = S0 + (1 - S0)(1 - t)^3. Zhu and Gupta, To Prune, or Not to Prune (arXiv 1710.01878), equation 1.
    """

    def ceiling(self, progress: float) -> float:
        """See the class."""
        return self.target + (1 - self.target) * (1 - progress) ** 3
