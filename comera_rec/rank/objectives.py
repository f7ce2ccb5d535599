"""What a stage of rank-adaptive training minimizes, and how large the trains may be on the way.

L task loss, S size of all trains relative to that at the start of the stage, L0 and S0 their targets. A new objective is a class
with the three members of `Objective` and a line in `RankScheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from comera_rec.rank.penalty import core_norm, model_size_surrogate


class Objective(Protocol):
    """A stage's objective; it holds no state that changes."""

    @property
    def threshold(self) -> float:
        """Ranks with |D| below it are truncated."""

    def loss(self, task_loss: Tensor, model: nn.Module) -> tuple[Tensor, str | Tensor]:
        """What to minimize, and which objective it descends on: "loss" or "size", or a tensor of 0 or 1, not waited for."""

    def ceiling(self, progress: float) -> float:
        """The largest size that the trains may have, relative to that at the start of the stage, at a progress of 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """L + gamma S + beta |G|^2: linear scalarization, CoMERA section 3.2 (arXiv 2405.14377).

    Attributes:
        reference: parameters in all trains at the start.
        num_cores: of all trains.
        gamma, beta, threshold: as in `RankConfig`.
    """

    reference: int
    num_cores: int
    gamma: float
    beta: float
    threshold: float

    def loss(self, task_loss: Tensor, model: nn.Module) -> tuple[Tensor, str]:
        """See the class."""
        total = task_loss + self.gamma * model_size_surrogate(model) / self.reference if self.gamma else task_loss
        return total + self.beta * core_norm(model, self.num_cores) if self.beta else total, "loss"

    def ceiling(self, progress: float) -> float:
        """No ceiling."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Achievement:
    """max(w_loss (L - L0)/L0, w_size (S - S0)/S0) + rho (L/L0 + S/S0): achievement scalarization, CoMERA eq. 10.

    S is the size really held; its gradient is the surrogate's. The ceiling falls linearly, for where the price alone is too slow.

    Attributes:
        reference: parameters in all trains at the start.
        held: parameters in all trains now.
        target: S0.
        target_loss: L0.
        w_loss, w_size, rho, threshold: as in `RankConfig`.
    """

    reference: int
    held: int
    target: float
    target_loss: float
    w_loss: float
    w_size: float
    rho: float
    threshold: float

    def loss(self, task_loss: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
        """See the class."""
        surrogate = model_size_surrogate(model) / self.reference
        loss_ratio = task_loss / self.target_loss
        size_ratio = (surrogate + (self.held / self.reference - surrogate.detach())) / self.target
        gaps = torch.stack([self.w_loss * (loss_ratio - 1), self.w_size * (size_ratio - 1)])
        return gaps.max() + self.rho * (loss_ratio + size_ratio), gaps.detach().argmax()

    def ceiling(self, progress: float) -> float:
        """From 1 down to the target in a straight line."""
        return self.target + (1 - self.target) * (1 - progress)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """L alone, under a ceiling that ends at the target: fast at first, while much is redundant, then ever slower.

    S(t) = S0 + (1 - S0)(1 - t)^3. Zhu and Gupta, To Prune, or Not to Prune (arXiv 1710.01878), equation 1.

    Attributes:
        target: S0.
    """

    target: float
    threshold: float = 0.0

    def loss(self, task_loss: Tensor, model: nn.Module) -> tuple[Tensor, str]:
        """See the class."""
        return task_loss, "loss"

    def ceiling(self, progress: float) -> float:
        """See the class."""
        return self.target + (1 - self.target) * (1 - progress) ** 3
