"""Selection of the ranks to keep: those above a threshold, or those of the highest scores within a budget.

Sizes are in units, where a parameter counts 1 or its bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.tt import TTShape

Masks = list[list[Tensor]]
"""Per module and bond, a boolean mask [r_k] of the ranks to keep."""
CLOSE = 0.99
"""Smallest share of its budget that a selection fills, where whole ranks allow it."""
_MAX_EXCHANGES = 100_000
Move = tuple[int, int, int]
"""(index of a module, index of a bond, +1 or -1 ranks)."""


def above_threshold(shapes: Sequence[TTShape], magnitudes: Sequence[Sequence[Tensor]], threshold: float, floor: int = 0) -> Masks:
    """Keep the ranks with |D| of at least a threshold; remove the smallest |D| first, but never go below a size of `floor`.

    Args:
        shapes: one per TT module.
        magnitudes: |D| [r_k], per module and bond.
        threshold: ranks with |D| below it are removed.
        floor: number of parameters that all modules together keep at least.
    """
    selection = _Selection(shapes, magnitudes)
    candidates = sorted(
        (float(score), i, k)
        for i, bonds in enumerate(selection.scores)
        for k, scores in enumerate(bonds)
        for score in scores
        if score < threshold
    )
    for _, i, k in candidates:
        if selection.ranks[i][k] and selection.total + selection.change([(i, k, -1)]) >= floor:
            selection.apply([(i, k, -1)])
    return selection.masks()


def within_budget(
    shapes: Sequence[TTShape],
    scores: Sequence[Sequence[Tensor]],
    budget: int,
    units: Sequence[int] | None = None,
    *,
    lasting: Sequence[bool] | None = None,
    exact: bool = True,
) -> Masks:
    """Keep the ranks of the highest scores within a budget.

    Ranks with the lowest score per unit saved are removed first; what one saves depends on the ranks left at neighboring bonds.

    Args:
        shapes: one per TT module.
        scores: the scores [r_k], per module and bond: non-negative, and additive over ranks.
        budget: size that all modules together may have at most, in units.
        units: size of one parameter of each module; default 1.
        lasting: modules that lose the last rank of a bond only if nothing else is left to remove; default none.
        exact: fill the budget to 99 % where whole ranks allow it, even at a loss of score: besides restoring ranks that fit,
            exchange two or three ranks of different sizes.
    """
    selection = _Selection(shapes, scores, units)
    if selection.total <= budget:
        return selection.masks()
    selection.least = [int(lasts) for lasts in lasting or selection.least]
    selection.shrink(budget)
    if selection.total > budget:
        selection.least = [0] * len(shapes)
        selection.shrink(budget)
    selection.fill(budget, exact=exact)
    return selection.masks()


class _Selection:
    """Number of ranks kept at each bond: those of the highest scores."""

    def __init__(self, shapes: Sequence[TTShape], scores: Sequence[Sequence[Tensor]], units: Sequence[int] | None = None) -> None:
        self.full = [shape.ranks for shape in shapes]
        self.ranks = [list(ranks) for ranks in self.full]
        self.least = [0] * len(shapes)
        self.order = [[bond.argsort(descending=True, stable=True).cpu() for bond in bonds] for bonds in scores]
        self.scores = [[bond.double().sort(descending=True).values.tolist() for bond in bonds] for bonds in scores]
        self.units = list(units or [1] * len(shapes))
        self.modes = [[m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)] for shape in shapes]
        self.total = sum(self._size(i, ranks) for i, ranks in enumerate(self.ranks))

    def _size(self, i: int, ranks: Sequence[int]) -> int:
        """Return the size of a module, as `TTShape.num_params` does; called many thousand times, so no shape is built."""
        if ranks and not min(ranks):
            return 0
        cores = zip([1, *ranks], self.modes[i], [*ranks, 1], strict=True)
        return self.units[i] * (sum(a * size * b for a, size, b in cores) + sum(ranks))

    def _moved(self, moves: Sequence[Move]) -> dict[int, list[int]]:
        """Return the ranks after moves, by module; a module removed has rank 0 at all bonds, and one restored has rank 1 at all."""
        moved: dict[int, list[int]] = {}
        for i, k, by in moves:
            ranks = moved.setdefault(i, list(self.ranks[i]))
            ranks[k] += by
            if by > 0 and not min(ranks):
                ranks[:] = [1] * len(ranks)
            elif not min(ranks):
                ranks[:] = [0] * len(ranks)
        return moved

    def change(self, moves: Sequence[Move]) -> int:
        """Return the change of size by moves."""
        return sum(self._size(i, ranks) - self._size(i, self.ranks[i]) for i, ranks in self._moved(moves).items())

    def loss(self, moves: Sequence[Move]) -> float:
        """Return the score lost by moves; negative for a gain."""
        return sum(
            self.scores[i][k][self.ranks[i][k] - 1] if by < 0 else -self.scores[i][k][self.ranks[i][k]] for i, k, by in moves
        )

    def price(self, removal: Move) -> float:
        """Return the score lost per unit saved by removing a rank."""
        return self.loss([removal]) / -self.change([removal])

    def apply(self, moves: Sequence[Move]) -> None:
        """Make the moves."""
        self.total += self.change(moves)
        for i, ranks in self._moved(moves).items():
            self.ranks[i] = ranks

    def removals(self) -> list[Move]:
        """List the removals of one rank that are possible and leave each module its least ranks."""
        return [(i, k, -1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank > self.least[i]]

    def restorations(self) -> list[Move]:
        """List the restorations of one rank that are possible."""
        full = self.full
        return [(i, k, 1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank < full[i][k]]

    def shrink(self, budget: int) -> None:
        """Remove the ranks that lose the least score per unit saved until the rest fits, or until only least ranks are left."""
        prices = {move: self.price(move) for move in self.removals()}
        while self.total > budget and prices:
            cheapest = min(prices, key=lambda move: (prices[move], move))
            self.apply([cheapest])
            for move in [move for move in prices if move[0] == cheapest[0]]:  # prices in other modules don't change
                if self.ranks[move[0]][move[1]] > self.least[move[0]]:
                    prices[move] = self.price(move)
                else:
                    del prices[move]

    def fill(self, budget: int, *, exact: bool) -> None:
        """Spend the rest of a budget: restore ranks that fit; if `exact`, exchange ranks until it is nearly full."""
        while restorations := [[move] for move in self.restorations() if 0 < self.change([move]) <= budget - self.total]:
            self.apply(min(restorations, key=lambda moves: self.loss(moves) / self.change(moves)))
        while exact and self.total < CLOSE * budget and (exchange := self._exchange(budget)):
            self.apply(exchange)

    def _exchange(self, budget: int) -> list[Move] | None:
        """Return the exchange of two ranks, or else of three, that nearly fills the budget and loses the least score.

        If no exchange nearly fills it, return the one that fills it most, or None if none helps.
        """
        fullest, filling = self.total, None
        removals, restorations = self.removals(), self.restorations()
        for kinds in ((removals, restorations), (removals, restorations, restorations), (removals, removals, restorations)):
            best, least = None, float("inf")
            for moves in itertools.islice(itertools.product(*kinds), _MAX_EXCHANGES):
                if self._interfere(moves):
                    continue
                total = self.total + self.change(moves)
                if CLOSE * budget <= total <= budget and self.loss(moves) < least:
                    best, least = list(moves), self.loss(moves)
                elif fullest < total <= budget:
                    fullest, filling = total, list(moves)
            if best:
                return best
        return filling

    def _interfere(self, moves: Sequence[Move]) -> bool:
        """Return whether two moves are at one bond, or in one module that either may remove or restore as a whole."""
        modules = [i for i, _, _ in moves]
        return len({move[:2] for move in moves}) < len(moves) or any(
            modules.count(i) > 1 and min(self.ranks[i]) < 2 for i in modules
        )

    def masks(self) -> Masks:
        """Return the masks of the ranks kept."""
        result = []
        for full, ranks, orders in zip(self.full, self.ranks, self.order, strict=True):
            masks = [torch.zeros(size, dtype=torch.bool) for size in full]
            for mask, order, rank in zip(masks, orders, ranks, strict=True):
                mask[order[:rank]] = True
            result.append(masks)
        return result
