"""The stages of rank-adaptive training: price ranks early, then descend to a target size, truncating physically on the way.

CoMERA, section 3.3 (arXiv 2405.14377): L task loss, S size relative to that at the end of the early stage, L0 and S0 their targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn import named_tt_modules
from comera_rec.rank.penalty import core_norm, model_size_surrogate
from comera_rec.rank.truncation import count_tt_params, truncate_ranks_


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """When ranks shrink, and how far.

    Attributes:
        early_steps: steps of the early stage, which minimizes L + gamma S + beta |G|^2.
        late_steps: the most steps of the late stage, which minimizes max(w_loss (L - L0)/L0, w_size (S - S0)/S0) + rho (L/L0 +
            S/S0). It ends as soon as the size has reached its target. Where the price alone is too slow for that, the ranks
            with the smallest |D| go little by little, so that the size falls at least linearly.
        target_size: S0, parameters wanted in all trains as a fraction of those at the end of the early stage; None for no late
            stage.
        target_loss: L0; None takes the running mean of the task loss at the end of the early stage.
        gamma: price of size in the early stage.
        beta: price of the mean square of the cores in the early stage, so that scale cannot hide in them.
        w_loss, w_size: weights of the two relative gaps in the late stage.
        rho: weight of the sum that keeps both objectives moving in the late stage.
        threshold: ranks with |D| below it are truncated.
        truncate_every: steps between truncations.
    """

    early_steps: int
    late_steps: int = 0
    target_size: float | None = None
    target_loss: float | None = None
    gamma: float = 0.01
    beta: float = 0.0
    w_loss: float = 1.0
    w_size: float = 1.0
    rho: float = 1.0
    threshold: float = 0.05
    truncate_every: int = 50

    def __post_init__(self) -> None:
        if self.early_steps < 1:
            raise ValueError(f"early_steps is {self.early_steps}: give at least 1")
        if self.truncate_every < 1:
            raise ValueError(f"truncate_every is {self.truncate_every}: give at least 1")
        if self.target_size is not None and not 0 < self.target_size <= 1:
            raise ValueError(f"target_size is {self.target_size}: give a fraction of the early stage's size, above 0 and at most 1")
        if (self.target_size is not None) != (self.late_steps > 0):
            raise ValueError(f"target_size is {self.target_size} and late_steps is {self.late_steps}: a late stage needs both")
        if self.target_loss is not None and not self.target_loss > 0:
            raise ValueError(f"target_loss is {self.target_loss}: give a positive number")
        for name in ("gamma", "beta", "w_loss", "w_size", "rho", "threshold"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a non-negative number")


class RankScheduler:
    """Adds the price of size to the loss, counts steps, and truncates ranks when their time has come.

    Args:
        model: holds the tensor-train modules; the scheduler looks them up by name, so build it after all swaps.
        optimizer: over the model's parameters; its state is sliced with them.
        config: the schedule.

    Raises:
        ValueError: if the model holds no tensor-train module.

    Example:
        >>> scheduler = RankScheduler(model, optimizer, RankConfig(early_steps=1000))  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = scheduler.loss(task_loss(model, batch))
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: RankConfig) -> None:
        if not any(True for _ in named_tt_modules(model)):
            raise ValueError("the model holds no tensor-train module: swap tables or linear layers before building a RankScheduler")
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.stage = "early"
        self.steps = 0
        self.late_start = 0
        self.reference_params = count_tt_params(model)
        self.target_params: int | None = None
        self.target_loss = config.target_loss
        self.objective: str | None = None
        self.history: list[dict[str, Any]] = []
        self._mean_loss: Tensor | None = None
        self._record()

    def loss(self, task_loss: Tensor) -> Tensor:
        """The objective of the current stage for a task loss (a scalar); call `backward` on what it returns."""
        self._observe(task_loss.detach())
        if self.stage == "done":
            self.objective = "loss"
            return task_loss
        size = model_size_surrogate(self.model) / self.reference_params
        if self.stage == "early":
            self.objective = "loss"
            total = task_loss + self.config.gamma * size
            return total + self.config.beta * core_norm(self.model) if self.config.beta else total
        return self._achievement(task_loss, size)

    def _achievement(self, task_loss: Tensor, size: Tensor) -> Tensor:
        """max of the weighted relative gaps plus rho times the sum (achievement scalarization, CoMERA eq. 10).

        The size gap is that of the parameters really held; its gradient is the surrogate's.
        """
        assert self.target_loss is not None
        assert self.config.target_size is not None
        held = count_tt_params(self.model) / self.reference_params
        loss_ratio = task_loss / self.target_loss
        size_ratio = (size + (held - size.detach())) / self.config.target_size
        gaps = torch.stack([self.config.w_loss * (loss_ratio - 1), self.config.w_size * (size_ratio - 1)])
        self.objective = ("loss", "size")[int(gaps.detach().argmax())]
        return gaps.max() + self.config.rho * (loss_ratio + size_ratio)

    def _observe(self, loss: Tensor) -> None:
        # About the last hundred steps: long enough to smooth batches, short enough to follow training.
        self._mean_loss = loss.clone() if self._mean_loss is None else self._mean_loss.lerp(loss, 0.01)

    def step(self) -> None:
        """Count one optimizer step; truncate and change stage when they are due. Call it after `optimizer.step()`."""
        self.steps += 1
        if self.stage == "done":
            return
        early_ends = self.stage == "early" and self.steps >= self.config.early_steps
        late_ends = self.stage == "late" and self.steps - self.late_start >= self.config.late_steps
        if not (early_ends or late_ends or self.steps % self.config.truncate_every == 0):
            return
        self._truncate()
        if early_ends:
            self._end_early()
        elif self.stage == "late" and (late_ends or count_tt_params(self.model) <= self._acceptable()):
            self.stage = "done"
        self._record()

    def _truncate(self) -> None:
        target = self.target_params or 0
        truncate_ranks_(self.model, self.optimizer, threshold=self.config.threshold, min_params=target)
        if self.stage == "late":
            # Little by little instead of off a cliff at the end: the size falls at least linearly towards the target.
            left = 1 - (self.steps - self.late_start) / self.config.late_steps
            allowed = target + max(0.0, left) * (self.reference_params - target)
            truncate_ranks_(self.model, self.optimizer, threshold=float("inf"), min_params=round(allowed))

    def _acceptable(self) -> float:
        assert self.target_params is not None
        return 1.01 * self.target_params

    def _end_early(self) -> None:
        if self.config.target_size is None:
            self.stage = "done"
            return
        self.stage = "late"
        self.late_start = self.steps
        self.reference_params = max(1, count_tt_params(self.model))
        self.target_params = round(self.config.target_size * self.reference_params)
        if self.target_loss is None:
            assert self._mean_loss is not None
            self.target_loss = float(self._mean_loss)

    def _record(self) -> None:
        self.history.append(
            {
                "step": self.steps,
                "stage": self.stage,
                "objective": self.objective,
                "params": count_tt_params(self.model),
                "target_params": self.target_params,
                "loss": None if self._mean_loss is None else float(self._mean_loss),
                "ranks": {name: list(module.shape.ranks) for name, module in named_tt_modules(self.model)},
            }
        )

    _STATE = ("stage", "steps", "late_start", "reference_params", "target_params", "target_loss", "objective", "history")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the ranks themselves, which the model's own state dict carries."""
        state = {name: getattr(self, name) for name in self._STATE}
        return {**state, "history": list(self.history), "mean_loss": self._mean_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; load the model's and the optimizer's state dicts as well."""
        for name in self._STATE:
            setattr(self, name, state[name])
        self.history = list(state["history"])
        self._mean_loss = state["mean_loss"]
