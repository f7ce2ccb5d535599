"""Scores of ranks, comparable across bonds, layers and scales.

Rank j of bond k stands for one term T_kj of the matrix, the sum over all paths through it: T_kj = D_k[j] L_k[:, j] R_k[j, :], with
L_k and R_k contracted from the cores before and after the bond. Any part of its scale may be in the cores, so |D_k[j]| alone says
little; the scores "norm" and "taylor" depend on T_kj only.

    norm       decrease of the logarithm of the bond's squared norm as the rank is removed, weakest ranks first; the squared norm
               is the sum of |T_kj|^2 = D_k[j]^2 (L_k^T L_k)[j, j] (R_k R_k^T)[j, j]. Norms are compared only within a bond,
               because a table's norm grows with its rows; so no matrix vanishes while others can shrink.
    taylor     mean over steps of (dL/dD_k[j] D_k[j])^2 = <dL/dE, T_kj>^2: squared change of the loss, to first order
    magnitude  D_k[j]^2, for comparison

The score of several ranks is the sum of their scores. Taylor scores: Molchanov et al., Importance Estimation for Neural Network
Pruning (CVPR 2019, arXiv 1906.10771), equation 8.

r rank of a bond; a, b ranks before and after a core; m, n its modes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from comera_rec.nn import TTModule
from data_pipeline.errors import UserError

SCORES = ("taylor", "norm", "magnitude")
NO_GRADIENTS = "score is 'taylor' but step() found no gradients: call it after optimizer.step(), before zero_grad()"


def magnitude_scores(module: TTModule) -> list[Tensor]:
    """Return D_k^2 [r_k] of every bond."""
    return [rank.detach().double().square().flatten() for rank in module.rank_parameters()]


def norm_scores(module: TTModule) -> list[Tensor]:
    """Return the score "norm" [r_k] of every bond, computed from Gram matrices in time proportional to parameters times a rank."""
    cores = [core.detach().double() for core in module.cores()]
    ranks = [rank.detach().double().flatten() for rank in module.rank_parameters()]
    left = _left_grams(cores, ranks, module.sum_over_shards)
    right = _left_grams([core.permute(3, 1, 2, 0) for core in reversed(cores)], ranks[::-1])[::-1]
    bonds = zip(ranks, left, right, strict=True)
    return [_log_decreases(rank.square() * before.diagonal() * after.diagonal()) for rank, before, after in bonds]


def _log_decreases(squares: Tensor) -> Tensor:
    """Return by how much each square [r] lowers the sum's logarithm when removed, smallest first; 1e-9 of the sum always stays."""
    ascending, order = squares.sort(stable=True)
    sums = ascending.flip(0).cumsum(0).flip(0)
    sums = torch.cat([sums, sums.new_zeros(1)]).clamp_min(1e-9 * squares.sum())
    decreases = torch.nan_to_num(sums.log().diff().neg())  # not a number where all squares are zero
    return torch.empty_like(decreases).scatter_(0, order, decreases)


def _left_grams(
    cores: Sequence[Tensor], ranks: Sequence[Tensor], sum_of_first: Callable[[Tensor], Tensor] = lambda gram: gram
) -> list[Tensor]:
    """Return L_k^T L_k [r_k, r_k] of every bond k; `sum_of_first` sums the first one over the shards of the first core."""
    gram_aa, grams = cores[0].new_ones(1, 1), list[Tensor]()
    for core_amnb, rank_b in zip(cores, ranks, strict=False):
        weighted_amnb = (gram_aa @ core_amnb.flatten(1)).view(core_amnb.shape)
        gram_bb = core_amnb.flatten(0, 2).mT @ weighted_amnb.flatten(0, 2)
        if not grams:
            gram_bb = sum_of_first(gram_bb)
        grams.append(gram_bb)
        gram_aa = rank_b[:, None] * gram_bb * rank_b
    return grams


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


STATIC_SCORES: dict[str, Callable[[TTModule], list[Tensor]]] = {"norm": norm_scores, "magnitude": magnitude_scores}
"""Scores that need nothing but the module, by name."""
