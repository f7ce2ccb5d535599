"""Scores of ranks, comparable across bonds, layers and scales.

Rank j of bond k stands for one term T_kj of the matrix, the sum over all paths through it: T_kj = D_k[j] L_k[:, j] R_k[j, :], with
L_k and R_k contracted from the cores before and after the bond. Any part of its scale may be in the cores, so |D_k[j]| alone says
little. Its score is the mean over steps of (dL/dD_k[j] D_k[j])^2 = <dL/dE, T_kj>^2, to first order the squared change of the loss
if the term is removed. The score of several ranks is the sum of their scores.

Molchanov et al., Importance Estimation for Neural Network Pruning (CVPR 2019, arXiv 1906.10771), equation 8.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from comera_rec.nn import TTModule
from data_pipeline.errors import UserError

NO_GRADIENTS = "step() found no finite gradients: call it after optimizer.step(), before zero_grad(), or lower learning rates"


class TaylorScores:
    """Running mean of (dL/dD D)^2, where each step's scores are scaled to sum to one.

    So every step counts alike, whatever the scale of its loss (GradScaler, gradient accumulation, progress of training). Steps
    whose gradients are not finite are left out, as GradScaler does.

    Args:
        modules: the TT modules of this process by name, which may be none.
    """

    decay = 0.98  # averages over about fifty steps

    def __init__(self, modules: Mapping[str, TTModule]) -> None:
        self._modules = modules
        self.mean: Tensor | None = None  # [ranks of all bonds of all modules]
        self._unseen = set(modules)  # those that no loss has depended on yet

    def observe(self, total: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a step's gradients to the mean, before they are cleared; doesn't wait for the device.

        Args:
            total: sums the squares [ranks of these modules] over the modules of all processes, each of which must call it in every
                step; None for one process.
        """
        ranks = [rank for module in self._modules.values() for rank in module.rank_parameters()]
        if total is None and all(rank.grad is None for rank in ranks):
            return
        self._unseen = {name for name in self._unseen if all(rank.grad is None for rank in self._modules[name].rank_parameters())}
        values = [rank.detach().double() * (0.0 if rank.grad is None else rank.grad.double()) for rank in ranks]
        squares = (torch.cat([each.flatten() for each in values]) if values else torch.zeros(0, dtype=torch.float64)).square()
        sum_ = squares.sum() if total is None else total(squares)
        shares = torch.nan_to_num(squares / sum_, nan=0.0, posinf=0.0)
        mean = shares if self.mean is None else self.mean
        self.mean = torch.where(sum_.isfinite() & (sum_ > 0), mean.lerp(shares, 1 - self.decay), mean)

    def scores(self) -> dict[str, list[Tensor]]:
        """Return the scores [r_k] of every module's bonds, by name: NaN in modules that never had gradients.

        Raises:
            ValueError: no gradients were seen.
        """
        if self.mean is None and self._modules:
            raise UserError(NO_GRADIENTS)
        parts = {name: part * math.nan if name in self._unseen else part for name, part in self._parts().items()}
        return {name: list(part.split(self._modules[name].shape.ranks)) for name, part in parts.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the scores of each module by name, [ranks of all its bonds]; empty before the first gradients."""
        return {name: part.tolist() for name, part in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        sizes = [sum(module.shape.ranks) for module in self._modules.values()]
        return {} if self.mean is None else dict(zip(self._modules, self.mean.split(sizes), strict=True))

    def load_state_dict(self, parts: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state_dict` returned, possibly in a process with other modules than the one that saved it."""
        values = [value for name in self._modules for value in parts.get(name, ())]
        device = next((module.core_0.device for module in self._modules.values()), None)
        self.mean = torch.tensor(values, dtype=torch.float64, device=device) if parts else None
        self._unseen = {name for name in self._modules if not any(parts.get(name, ()))}

    def slice_(self, masks: Sequence[Sequence[Tensor]]) -> None:
        """Keep the scores of the ranks that a truncation keeps; a mask per module and bond."""
        if self.mean is not None and masks:
            self.mean = self.mean[torch.cat([mask for bonds in masks for mask in bonds]).to(self.mean.device)]
