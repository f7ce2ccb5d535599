"""Scores of ranks, comparable across bonds, layers and scales.

Rank j of bond k stands for one term T_kj of the matrix, the sum over all paths through it: T_kj = D_k[j] L_k[:, j] R_k[j, :], with
L_k and R_k contracted from the cores before and after the bond. Any part of its scale may be in the cores, so |D_k[j]| alone says
little. Its score is the mean over steps of (dL/dD_k[j] D_k[j])^2 = <dL/dE, T_kj>^2, to first order the squared change of the loss
if the term is removed. The score of several ranks is the sum of their scores.

Molchanov et al., Importance Estimation for Neural Network Pruning (CVPR 2019, arXiv 1906.10771), equation 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from comera_rec.nn import TTModule
from data_pipeline.errors import UserError

NO_GRADIENTS = "step() found no gradients: call it after optimizer.step(), before zero_grad()"


class TaylorScores:
    """Running mean of (dL/dD D)^2, where each step's scores are scaled to sum to one.

    So every step counts alike, whatever the scale of its loss (GradScaler, gradient accumulation, progress of training). Steps
    whose gradients are not finite are left out, as GradScaler does.
    """

    decay = 0.98  # averages over about fifty steps

    def __init__(self) -> None:
        self.mean: Tensor | None = None  # [ranks of all bonds of all modules]

    def observe(self, modules: Sequence[TTModule], total: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a step's gradients to the mean, before they are cleared; doesn't wait for the device.

        Args:
            modules: the TT modules of this process, which may be none.
            total: sums the squares [ranks of these modules] over the modules of all processes, each of which must call it in every
                step; None for one process.
        """
        ranks = [rank for module in modules for rank in module.rank_parameters()]
        if total is None and all(rank.grad is None for rank in ranks):
            return
        values = [rank.detach().double() * (0.0 if rank.grad is None else rank.grad.double()) for rank in ranks]
        squares = (torch.cat([each.flatten() for each in values]) if values else torch.zeros(0, dtype=torch.float64)).square()
        sum_ = squares.sum() if total is None else total(squares)
        shares = torch.nan_to_num(squares / sum_, nan=0.0, posinf=0.0)
        mean = shares if self.mean is None else self.mean
        self.mean = torch.where(sum_.isfinite() & (sum_ > 0), mean.lerp(shares, 1 - self.decay), mean)

    def scores(self, modules: Sequence[TTModule]) -> list[list[Tensor]]:
        """Return the scores [r_k] of every module and bond.

        Raises:
            ValueError: if no gradients were seen.
        """
        if self.mean is None and modules:
            raise UserError(NO_GRADIENTS)
        if self.mean is None:
            return []
        bonds = iter(self.mean.split([len(rank) for module in modules for rank in module.rank_parameters()]))
        return [[next(bonds) for _ in module.rank_parameters()] for module in modules]

    def by_name(self, modules: Mapping[str, TTModule]) -> dict[str, list[float]]:
        """Return the scores of each module by name, [ranks of all its bonds]; empty before the first gradients."""
        if self.mean is None:
            return {}
        sizes = [sum(module.shape.ranks) for module in modules.values()]
        return {name: part.tolist() for name, part in zip(modules, self.mean.cpu().split(sizes), strict=True)}

    def load_by_name(self, parts: Mapping[str, Sequence[float]], modules: Mapping[str, TTModule]) -> None:
        """Restore what `by_name` returned, possibly in a process with other modules than the one that saved it."""
        values = [value for name in modules for value in parts.get(name, ())]
        device = next((module.core_0.device for module in modules.values()), None)
        self.mean = torch.tensor(values, dtype=torch.float64, device=device) if parts else None

    def slice_(self, masks: Sequence[Sequence[Tensor]]) -> None:
        """Keep the scores of the ranks that a truncation keeps; a mask per module and bond."""
        if self.mean is not None and masks:
            self.mean = self.mean[torch.cat([mask for bonds in masks for mask in bonds]).to(self.mean.device)]
