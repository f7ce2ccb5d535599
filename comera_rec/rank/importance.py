"""What each rank of a train is worth, comparable across bonds, layers and scales.

Rank j of bond k stands for one term T_kj of the matrix, the sum over all paths through it: T_kj = D_k[j] L_k[:, j] R_k[j, :], with
L_k and R_k contracted from the cores before and after the bond. Half of a column's scale may sit in a core, so |D_k[j]| alone says
nothing; the scores here depend on T_kj only.

    norm       ln of what is left of the bond's squared norm before and after the rank goes, the weakest first: the shares
               |T_kj|^2 = D_k[j]^2 (L_k^T L_k)[j, j] (R_k R_k^T)[j, j]. A table's norm is large for its many rows, not for its
               worth, so only parts of a norm are compared; and no matrix vanishes while others can shrink.
    taylor     mean over steps of (dL/dD_k[j] D_k[j])^2 = <dL/dE, T_kj>^2: squared change of the loss, to first order
    magnitude  D_k[j]^2, for comparison

Those of several ranks add. Taylor scores: Molchanov et al., Importance Estimation for Neural Network
Pruning (CVPR 2019, arXiv 1906.10771), equation 8.

r rank of a bond; a, b ranks before and after a core; m, n its modes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from comera_rec.nn import TTModule

SCORES = ("taylor", "norm", "magnitude")


def magnitude_scores(module: TTModule) -> list[Tensor]:
    """D_k^2 [r_k] of every bond."""
    return [rank.detach().double().square() for rank in module.rank_parameters()]


def norm_scores(module: TTModule) -> list[Tensor]:
    """By how much each rank's going lowers ln |W|^2 [r_k], by the Gram matrices of both sides: work of the cores times a rank."""
    cores = [core.detach().double() for core in module.cores()]
    ranks = [rank.detach().double() for rank in module.rank_parameters()]
    left = _left_grams(cores, ranks, module.sum_over_shards)
    right = _left_grams([core.permute(3, 1, 2, 0) for core in reversed(cores)], ranks[::-1])[::-1]
    bonds = zip(ranks, left, right, strict=True)
    return [_falls_of_logarithm(rank.square() * before.diagonal() * after.diagonal()) for rank, before, after in bonds]


def _falls_of_logarithm(squares: Tensor) -> Tensor:
    """ln(what is left before / after) [r] as each goes, the smallest first; nothing left counts as 1e-9 of all."""
    ascending, order = squares.sort(stable=True)
    left = ascending.flip(0).cumsum(0).flip(0)
    left = torch.cat([left, left.new_zeros(1)]).clamp_min(1e-9 * squares.sum())
    falls = torch.nan_to_num(left.log().diff().neg())  # zeros have nothing to lose
    return torch.empty_like(falls).scatter_(0, order, falls)


def _left_grams(
    cores: Sequence[Tensor], ranks: Sequence[Tensor], sum_of_first: Callable[[Tensor], Tensor] = lambda gram: gram
) -> list[Tensor]:
    """L_k^T L_k [r_k, r_k] for every bond k; `sum_of_first` adds up what the shards of the first core give."""
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
    """Running mean of (dL/dD D)^2 over the last steps, each step's scores scaled to sum to one.

    So neither the scale of the loss (GradScaler, gradient accumulation) nor its fall over training weighs some steps more. Steps
    whose gradients are not finite are left out, as GradScaler does.
    """

    decay = 0.98  # about the last fifty steps

    def __init__(self) -> None:
        self.mean: Tensor | None = None  # [all ranks of all bonds of all trains]

    def observe(self, modules: Sequence[TTModule], total: Callable[[Tensor], Tensor] = lambda shares: shares.sum()) -> None:
        """Take the gradients of a step in, before they are cleared; does not wait for the device.

        Args:
            modules: the trains of this process.
            total: sums squares [all their ranks] over the whole model, where this is a process's part of it.
        """
        ranks = [rank for module in modules for rank in module.rank_parameters()]
        if all(rank.grad is None for rank in ranks):
            return
        values = torch.cat([rank.detach() for rank in ranks]).double()
        gradients = torch.cat([torch.zeros_like(rank) if rank.grad is None else rank.grad for rank in ranks]).double()
        shares = (values * gradients).square()
        shares = torch.nan_to_num(shares / total(shares), nan=0.0, posinf=0.0)
        self.mean = shares if self.mean is None else self.mean.lerp(shares, 1 - self.decay)

    def scores(self, modules: Sequence[TTModule]) -> list[list[Tensor]]:
        """Per module and bond [r_k].

        Raises:
            ValueError: if no gradients were seen.
        """
        if self.mean is None:
            raise ValueError("score is 'taylor' but step() found no gradients: call it after optimizer.step(), before zero_grad()")
        bonds = iter(self.mean.split([len(rank) for module in modules for rank in module.rank_parameters()]))
        return [[next(bonds) for _ in module.rank_parameters()] for module in modules]

    def by_name(self, modules: Mapping[str, TTModule]) -> dict[str, list[float]]:
        """Each train's part of the mean, [all its ranks]; nothing before the first gradients."""
        if self.mean is None:
            return {}
        sizes = [sum(module.shape.ranks) for module in modules.values()]
        return {name: part.tolist() for name, part in zip(modules, self.mean.cpu().split(sizes), strict=True)}

    def load_by_name(self, parts: Mapping[str, Sequence[float]], modules: Mapping[str, TTModule]) -> None:
        """The inverse of `by_name`, where this process may hold other trains than the one that saved."""
        values = [value for name in modules for value in parts.get(name, ())]
        device = next((module.core_0.device for module in modules.values()), None)
        self.mean = torch.tensor(values, dtype=torch.float64, device=device) if parts else None

    def slice_(self, masks: Sequence[Sequence[Tensor]]) -> None:
        """Follow a truncation: keep the scores of the ranks kept."""
        if self.mean is not None:
            self.mean = self.mean[torch.cat([mask for each in masks for mask in each]).to(self.mean.device)]


STATIC_SCORES: dict[str, Callable[[TTModule], list[Tensor]]] = {"norm": norm_scores, "magnitude": magnitude_scores}
"""Scores that a module tells at any time."""
