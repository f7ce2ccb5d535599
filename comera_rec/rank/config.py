"""Settings of rank adaptation: when ranks shrink, how far, and by which objective."""

import math
from dataclasses import dataclass
from typing import Literal

from data_pipeline.errors import UserError

TARGETS = ("target_size", "target_params", "target_bytes", "target_compression")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Settings of `RankScheduler`: the stages, the target size, and the objective that leads there.

    Attributes:
        early_steps: steps of the early stage, which minimizes L + gamma S + beta |G|^2.
        late_steps: steps of the late stage, in which TT modules shrink to the target.
        objective: objective of the late stage. "budget" minimizes the loss alone and removes the ranks with the lowest score
            (`rank.importance`) per parameter saved, fast at first and then ever more slowly, so that the final size is just below
            the target. "achievement" is CoMERA's: it minimizes max{w_loss (L - L0), w_size (S - S0)} + rho (L + S) +
            beta |G|^2, and the final size may differ from S0.
        target_size: target parameters of all TT modules, as a fraction of those at the end of the early stage. Give at most one
            target; without one there is no late stage.
        target_params, target_bytes: target parameters or bytes of all TT modules.
        target_compression: target ratio of the bytes of the dense model to those of this one, all layers included.
        target_loss: L0; None takes the running mean of the task loss at the end of the early stage.
        gamma: price of size in the early stage. It needs float32: 16-bit rank parameters, which start at 1, round small steps off.
        beta: price of the mean square of the cores, which keeps rank parameters from shrinking while cores grow instead; charged in
            the early stage and under "achievement".
        w_loss, w_size: weights of the two gaps of "achievement".
        rho: small weight of the sum L + S in "achievement"; it keeps both decreasing.
        threshold: ranks with |D| below it are truncated in the early stage and under "achievement".
        truncate_every: steps between truncations.

    Raises:
        ValueError: for values out of range, several targets, or a late stage without a target or the reverse.
    """

    early_steps: int
    late_steps: int = 0
    objective: Literal["budget", "achievement"] = "budget"
    target_size: float | None = None
    target_params: int | None = None
    target_bytes: int | None = None
    target_compression: float | None = None
    target_loss: float | None = None
    gamma: float = 0.01
    beta: float = 0.0
    w_loss: float = 1.0
    w_size: float = 1.0
    rho: float = 0.01
    threshold: float = 0.05
    truncate_every: int = 50

    def __post_init__(self) -> None:
        for name, least in (("early_steps", 1), ("late_steps", 0), ("truncate_every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} is {value}: give an integer of at least {least}")
        if self.objective not in ("achievement", "budget"):
            raise UserError(f"objective is {self.objective!r}: choose 'achievement' or 'budget'")
        self._check_targets()
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise UserError(f"target_loss is {self.target_loss}: give a finite number")
        for name in ("gamma", "beta", "w_loss", "w_size", "rho", "threshold"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}: give a non-negative number")

    def _check_targets(self) -> None:
        targets = {name: getattr(self, name) for name in TARGETS if getattr(self, name) is not None}
        if len(targets) > 1:
            raise UserError(f"{' and '.join(f'{name} {value}' for name, value in targets.items())} are given: give one target")
        if bool(targets) != (self.late_steps > 0):
            target = next((f"{name} is {value}" for name, value in targets.items()), "no target is given")
            raise UserError(
                f"{target} and late_steps is {self.late_steps}: a late stage needs both; "
                f"give late_steps and one of {', '.join(TARGETS)}"
            )
        for name, value in targets.items():
            if not (isinstance(value, int | float) and value > 0):
                raise UserError(f"{name} is {value!r}: give a positive number")
        if self.target_size is not None and self.target_size > 1:
            raise UserError(f"target_size is {self.target_size}: give a fraction of the early stage's size, at most 1")
