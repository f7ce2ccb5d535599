"""The stages of rank-adaptive training: price ranks early, then descend to a target size, truncating physically on the way.

CoMERA, section 3.3 (arXiv 2405.14377).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn import TTModule, named_tt_modules
from comera_rec.rank.config import RankConfig
from comera_rec.rank.importance import STATIC_SCORES, TaylorScores
from comera_rec.rank.objectives import Achievement, Budget, Objective, Price
from comera_rec.rank.selection import CLOSE, above_threshold, within_budget
from comera_rec.rank.truncation import count_tt_params, keep_ranks_


class RankScheduler:
    """Adds the price of size to the loss, counts steps, and truncates ranks when their time has come.

    Args:
        model: holds the tensor-train modules; the scheduler looks them up by name, so build it after all swaps.
        optimizer: over the model's parameters; its state is sliced with them.
        config: the schedule.

    Raises:
        ValueError: if the model holds no tensor-train module, or the layers outside the trains alone exceed `target_compression`.

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
        self.reference_size = 0
        self.target: int | None = None
        self.target_loss = config.target_loss
        self.objective: str | None = None
        self.history: list[dict[str, Any]] = []
        self._taylor = TaylorScores()
        self._mean_loss: Tensor | None = None
        if config.target_compression is not None:
            self._compressed_bytes(config.target_compression)  # a mistake shows before hours of training
        self._record()

    # -- what is minimized -----------------------------------------------------------------------------------------------------

    def loss(self, task_loss: Tensor) -> Tensor:
        """The objective of the current stage for a task loss (a scalar); call `backward` on what it returns."""
        self._observe(task_loss.detach())
        if self.stage == "done":
            self.objective = "loss"
            return task_loss
        total, self.objective = self._stage_objective().loss(task_loss, self.model)
        return total

    def _stage_objective(self) -> Objective:
        config = self.config
        if self.stage == "early":
            return Price(reference=self.reference_params, gamma=config.gamma, beta=config.beta, threshold=config.threshold)
        assert self.target is not None
        target = self.target / self.reference_size
        if config.objective == "budget":
            return Budget(target=target)
        assert self.target_loss is not None
        return Achievement(
            reference=self.reference_params, target=target, target_loss=self.target_loss,
            w_loss=config.w_loss, w_size=config.w_size, rho=config.rho, threshold=config.threshold,
        )  # fmt: skip

    def _observe(self, loss: Tensor) -> None:
        # About the last hundred steps: long enough to smooth batches, short enough to follow training.
        self._mean_loss = loss.clone() if self._mean_loss is None else self._mean_loss.lerp(loss, 0.01)

    # -- steps and stages ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one optimizer step; truncate and change stage when they are due.

        Call it after `optimizer.step()` and before gradients are cleared.
        """
        self.steps += 1
        if self.stage == "done":
            return
        if self.stage == "late" and self.config.score_used == "taylor":
            self._taylor.observe(self._modules())
        early_ends = self.stage == "early" and self.steps >= self.config.early_steps
        late_ends = self.stage == "late" and self.steps - self.late_start >= self.config.late_steps
        if not (early_ends or late_ends or self.steps % self.config.truncate_every == 0):
            return
        self._truncate(last=late_ends)
        if early_ends:
            self._end_early()
        elif self.stage == "late" and (late_ends or self._reached()):
            self._truncate(last=True)
            self.stage = "done"
        self._record()

    def _truncate(self, *, last: bool) -> None:
        modules, objective = self._modules(), self._stage_objective()
        if objective.threshold:
            masks = above_threshold(modules, objective.threshold, self.target or 0, self._units())
            keep_ranks_(modules, masks, self.optimizer)
        if self.stage == "late":
            progress = 1.0 if last else (self.steps - self.late_start) / self.config.late_steps
            ceiling = round(objective.ceiling(progress) * self.reference_size)
            # Before the last truncation a tenth more than the target stays: ranks to choose from when it is to be met exactly.
            assert self.target is not None
            if self._size() > ceiling and (last or ceiling > 1.1 * self.target):
                masks = within_budget(
                    [module.shape for module in modules], self._scores(modules), ceiling, self._units(), exact=last
                )
                keep_ranks_(modules, masks, self.optimizer)
                self._taylor.slice_(masks)

    def _reached(self) -> bool:
        # The price may bring the size to the target before its time; a budget spreads truncation over the whole stage.
        assert self.target is not None
        return self.config.objective == "achievement" and self._size() * CLOSE <= self.target

    def _scores(self, modules: list[TTModule]) -> list[list[Tensor]]:
        if self.config.score_used == "taylor":
            return self._taylor.scores(modules)
        return [STATIC_SCORES[self.config.score_used](module) for module in modules]

    def _end_early(self) -> None:
        if self.config.late_steps == 0:
            self.stage = "done"
            return
        self.stage = "late"
        self.late_start = self.steps
        self.reference_params = max(1, count_tt_params(self.model))
        self.reference_size = max(1, self._size())
        self.target = min(self._target(), self.reference_size)
        if self.target_loss is None:
            assert self._mean_loss is not None
            self.target_loss = float(self._mean_loss)

    # -- sizes, in bytes where the target is one of bytes, else in parameters ----------------------------------------------------

    def _modules(self) -> list[TTModule]:
        return [module for _, module in named_tt_modules(self.model)]

    def _units(self) -> list[int]:
        in_bytes = self.config.target_bytes is not None or self.config.target_compression is not None
        return [module.core_0.element_size() if in_bytes else 1 for module in self._modules()]

    def _size(self) -> int:
        return sum(unit * module.shape.num_params for unit, module in zip(self._units(), self._modules(), strict=True))

    def _target(self) -> int:
        config = self.config
        if config.target_size is not None:
            return round(config.target_size * self.reference_size)
        if config.target_compression is not None:
            return self._compressed_bytes(config.target_compression)
        target = config.target_params or config.target_bytes
        assert target is not None
        return target

    def _compressed_bytes(self, compression: float) -> int:
        """Bytes left for the trains when the whole model shall be so many times smaller than dense."""
        modules = self._modules()
        trains = {id(p): p.numel() * p.element_size() for module in modules for p in (*module.cores(), *module.rank_parameters())}
        others = sum(p.numel() * p.element_size() for p in self.model.parameters() if id(p) not in trains)
        dense = others + sum(module.num_rows * module.num_cols * module.core_0.element_size() for module in modules)
        if others >= dense / compression:
            raise ValueError(
                f"target_compression is {compression} but layers outside the trains take {others:,} of {dense:,} dense bytes: "
                f"give less than {dense / max(1, others):.1f}, or put more layers into trains"
            )
        return int(dense / compression) - others

    # -- state -----------------------------------------------------------------------------------------------------------------

    @property
    def target_params(self) -> int | None:
        """Parameters that the trains shall have at the end of the late stage; None before it."""
        if self.target is None:
            return None
        return round(self.target / self.reference_size * self.reference_params)

    def _record(self) -> None:
        modules = dict(named_tt_modules(self.model))
        self.history.append(
            {
                "step": self.steps,
                "stage": self.stage,
                "objective": self.objective,
                "params": count_tt_params(self.model),
                "bytes": sum(module.core_0.element_size() * module.shape.num_params for module in modules.values()),
                "target_params": self.target_params,
                "loss": None if self._mean_loss is None else float(self._mean_loss),
                "ranks": {name: list(module.shape.ranks) for name, module in modules.items()},
            }
        )

    _STATE = ("stage", "steps", "late_start", "reference_params", "reference_size", "target", "target_loss", "objective")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the ranks themselves, which the model's own state dict carries."""
        state = {name: getattr(self, name) for name in self._STATE}
        return {**state, "history": list(self.history), "mean_loss": self._mean_loss, "taylor": self._taylor.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; load the model's and the optimizer's state dicts as well."""
        for name in self._STATE:
            setattr(self, name, state[name])
        self.history = list(state["history"])
        self._mean_loss = state["mean_loss"]
        self._taylor.mean = state["taylor"]
