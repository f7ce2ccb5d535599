"""Selection of the ranks to keep: those above a threshold, or those of the highest scores within a budget.

Sizes are in units, where a parameter counts 1 or its bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.tt import TTShape

Masks = list[list[Tensor]]
"""Per module and bond, a boolean mask [r_k] of the ranks to keep."""
CLOSE = 0.99
"""Smallest share of its budget that a selection fills, where an exchange of two ranks allows it."""
Move = tuple[int, int, int]
"""(index of a module, index of a bond, +1 or -1 ranks)."""


def above_threshold(magnitudes: Sequence[Sequence[Tensor]], threshold: float, least: Sequence[int] | None = None) -> Masks:
    """Keep the ranks with |D| of at least a threshold, per module and bond; a module with an empty bond loses all its ranks.

    Bonds of modules whose `least` is 1 keep the rank of the largest |D| in any case.
    """
    kept = least or [0] * len(magnitudes)
    masks = [
        [~(magnitude < threshold) | (magnitude >= magnitude.max() if fewest and len(magnitude) else False) for magnitude in bonds]
        for bonds, fewest in zip(magnitudes, kept, strict=True)
    ]
    return [bonds if all(mask.any() for mask in bonds) else [torch.zeros_like(mask) for mask in bonds] for bonds in masks]


def within_budget(
    shapes: Sequence[TTShape],
    scores: Sequence[Sequence[Tensor]],
    budget: int,
    units: Sequence[int] | None = None,
    *,
    lasting: Sequence[bool] | None = None,
    least: Sequence[int] | None = None,
    exact: bool = True,
) -> Masks:
    """Keep the ranks of the highest scores within a budget.

    Ranks with the lowest score per unit saved are removed first; what one saves depends on the ranks left at neighboring bonds.
    What the last removals save too much is spent on ranks that still fit.

    Args:
        shapes: one per TT module.
        scores: the scores [r_k], per module and bond: non-negative, and additive over ranks.
        budget: size that all modules together may have at most, in units.
        units: size of one parameter of each module; default 1.
        lasting: modules that lose the last rank of a bond only if nothing else is left to remove; default none.
        least: ranks that the bonds of each module keep, whatever the budget; default 0.
        exact: fill the budget to 99 % where ranks allow it, even at a loss of score: besides restoring ranks that fit, exchange
            ranks of different modules.
    """
    selection, least = _Selection(shapes, scores, units), least or [0] * len(shapes)
    if selection.total <= budget:
        return selection.masks()
    selection.least = [max(fewest, int(lasts)) for fewest, lasts in zip(least, lasting or least, strict=True)]
    selection.shrink(budget)
    if selection.total > budget:
        selection.least = least
        selection.shrink(budget)
    selection.fill(budget, exact=exact)
    return selection.masks()


class _Selection:
    """Number of ranks kept at each bond: those of the highest scores."""

    def __init__(self, shapes: Sequence[TTShape], scores: Sequence[Sequence[Tensor]], units: Sequence[int] | None) -> None:
        self.full = [shape.ranks for shape in shapes]
        self.ranks = [list(ranks) for ranks in self.full]
        self.least: Sequence[int] = [0] * len(shapes)
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

    def _moved(self, move: Move) -> list[int]:
        """Return a module's ranks after a move; one removed has rank 0 at all bonds, and one restored has rank 1 at all."""
        i, k, by = move
        ranks = list(self.ranks[i])
        ranks[k] += by
        return ranks if min(ranks) else [int(by > 0)] * len(ranks)

    def _change(self, move: Move) -> int:
        """Return the change of size by a move."""
        return self._size(move[0], self._moved(move)) - self._size(move[0], self.ranks[move[0]])

    def _score(self, move: Move) -> float:
        """Return the score that a removal loses, or that a restoration gains."""
        i, k, by = move
        return self.scores[i][k][self.ranks[i][k] - (by < 0)]

    def _price(self, move: Move) -> float:
        """Return the score of a move per unit of size."""
        return self._score(move) / abs(self._change(move))

    def _apply(self, move: Move) -> None:
        self.total += self._change(move)
        self.ranks[move[0]] = self._moved(move)

    def shrink(self, budget: int) -> None:
        """Remove the ranks that lose the least score per unit until the rest fits, or until modules have their least ranks."""
        prices = {move: self._price(move) for move in self._removals()}
        while self.total > budget and prices:
            cheapest = min(prices, key=lambda move: (prices[move], move))
            self._apply(cheapest)
            for move in [move for move in prices if move[0] == cheapest[0]]:  # prices in other modules don't change
                if self.ranks[move[0]][move[1]] > self.least[move[0]]:
                    prices[move] = self._price(move)
                else:
                    del prices[move]

    def fill(self, budget: int, *, exact: bool) -> None:
        """Spend the rest of a budget: restore the ranks of the highest score per unit that fit; if `exact`, exchange ranks."""
        while moves := [move for move in self._restorations() if 0 < self._change(move) <= budget - self.total]:
            self._apply(max(moves, key=self._price))
        while exact and self.total < CLOSE * budget and (exchange := self._exchange(budget)):
            for move in exchange:
                self._apply(move)

    def _exchange(self, budget: int) -> tuple[Move, Move] | None:
        """Return the removal and the restoration, in different modules, that fill the budget most; None if none helps.

        Among those that nearly fill it, return the one that loses the least score.
        """
        removals, restorations = (
            {move: self._change(move) for move in moves} for moves in (self._removals(), self._restorations())
        )

        def value(exchange: tuple[Move, Move]) -> tuple[float, float]:
            removal, restoration = exchange
            total = self.total + removals[removal] + restorations[restoration]
            return min(total, CLOSE * budget), self._score(restoration) - self._score(removal)

        room = budget - self.total
        fitting = [(a, b) for a in removals for b in restorations if a[0] != b[0] and 0 < removals[a] + restorations[b] <= room]
        return max(fitting, key=value, default=None)

    def _removals(self) -> list[Move]:
        return [(i, k, -1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank > self.least[i]]

    def _restorations(self) -> list[Move]:
        return [(i, k, 1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank < self.full[i][k]]

    def masks(self) -> Masks:
        """Return the masks of the ranks kept."""
        result = []
        for full, ranks, orders in zip(self.full, self.ranks, self.order, strict=True):
            masks = [torch.zeros(size, dtype=torch.bool) for size in full]
            for mask, order, rank in zip(masks, orders, ranks, strict=True):
                mask[order[:rank]] = True
            result.append(masks)
        return result
