"""Which ranks to keep: those above a threshold, or the most valuable ones within a budget.

Sizes are counted in units: 1 a parameter, or the bytes of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_rec.tt import TTShape

Masks = list[list[Tensor]]
"""Per module and bond, which ranks to keep."""
CLOSE = 0.99
"""A selection fills at least this part of its budget where whole ranks allow it."""
_MOST_EXCHANGES = 100_000
Move = tuple[int, int, int]
"""A module, a bond, and +1 or -1 ranks."""


def above_threshold(
    shapes: Sequence[TTShape],
    magnitudes: Sequence[Sequence[Tensor]],
    threshold: float,
    floor: int = 0,
    units: Sequence[int] | None = None,
) -> Masks:
    """Keep the ranks with |D| [r_k] of at least a threshold; the smallest |D| go first, but never below a size of `floor`."""
    selection = _Selection(shapes, magnitudes, units)
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
    exact: bool = True,
) -> Masks:
    """Keep the ranks of most value within a budget.

    The rank that loses least score per unit saved goes first, each priced at the ranks that its neighbours still have.

    Args:
        shapes: of the trains.
        scores: per train and bond [r_k], the value of each rank, non-negative, such that those of several ranks add.
        budget: the most that all trains together may take.
        units: size of one parameter of each train; default 1.
        exact: fill the budget to 99 %, where whole ranks allow it, at the price of value: not only by giving back ranks that fit,
            but by exchanges of two or three ranks of other sizes.
    """
    selection = _Selection(shapes, scores, units)
    shrunk = selection.total > budget
    prices = {move: selection.price(move) for move in selection.downs()} if shrunk else {}
    while selection.total > budget and prices:
        cheapest = min(prices, key=lambda move: (prices[move], move))
        selection.apply([cheapest])
        for move in [move for move in prices if move[0] == cheapest[0]]:  # those of other modules are what they were
            if selection.ranks[move[0]][move[1]]:
                prices[move] = selection.price(move)
            else:
                del prices[move]
    if shrunk:
        selection.fill(budget, exact=exact)
    return selection.masks()


class _Selection:
    """How many ranks of each bond are kept; which ones follows from their scores."""

    def __init__(self, shapes: Sequence[TTShape], scores: Sequence[Sequence[Tensor]], units: Sequence[int] | None) -> None:
        self.full = [shape.ranks for shape in shapes]
        self.ranks = [list(ranks) for ranks in self.full]
        self.order = [[bond.argsort(descending=True, stable=True).cpu() for bond in bonds] for bonds in scores]
        self.scores = [[bond.double().sort(descending=True).values.tolist() for bond in bonds] for bonds in scores]
        self.units = list(units or [1] * len(shapes))
        self.modes = [[m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)] for shape in shapes]
        self.total = sum(self._size(i, ranks) for i, ranks in enumerate(self.ranks))

    def _size(self, i: int, ranks: Sequence[int]) -> int:
        """As `TTShape.num_params`, without making a shape for each of many thousand questions."""
        if ranks and not min(ranks):
            return 0
        cores = zip([1, *ranks], self.modes[i], [*ranks, 1], strict=True)
        return self.units[i] * (sum(a * size * b for a, size, b in cores) + sum(ranks))

    def _moved(self, moves: Sequence[Move]) -> dict[int, list[int]]:
        """The ranks of the modules that moves touch; a train that is gone has no ranks, and comes back with one on each bond."""
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
        """By how much the moves change the size."""
        return sum(self._size(i, ranks) - self._size(i, self.ranks[i]) for i, ranks in self._moved(moves).items())

    def loss(self, moves: Sequence[Move]) -> float:
        """The score that the moves lose; negative where they win some."""
        return sum(
            self.scores[i][k][self.ranks[i][k] - 1] if by < 0 else -self.scores[i][k][self.ranks[i][k]] for i, k, by in moves
        )

    def price(self, down: Move) -> float:
        """The score that a rank's going loses, per unit saved."""
        return self.loss([down]) / -self.change([down])

    def apply(self, moves: Sequence[Move]) -> None:
        self.total += self.change(moves)
        for i, ranks in self._moved(moves).items():
            self.ranks[i] = ranks

    def downs(self) -> list[Move]:
        """Every bond that can lose a rank."""
        return [(i, k, -1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank > 0]

    def ups(self) -> list[Move]:
        """Every bond that can take a rank back."""
        full = self.full
        return [(i, k, 1) for i, ranks in enumerate(self.ranks) for k, rank in enumerate(ranks) if rank < full[i][k]]

    def fill(self, budget: int, *, exact: bool) -> None:
        """Use what is left of a budget."""
        while ups := [[move] for move in self.ups() if 0 < self.change([move]) <= budget - self.total]:
            self.apply(min(ups, key=lambda moves: self.loss(moves) / self.change(moves)))
        while exact and self.total < CLOSE * budget and (exchange := self._exchange(budget)):
            self.apply(exchange)

    def _exchange(self, budget: int) -> list[Move] | None:
        """Of the exchanges of two ranks (or else of three) that fill the budget closely, the one that loses the least score.

        Where there is none, the one that fills it most; None where none fills it more.
        """
        fullest, filling = self.total, None
        for kinds in ((self.downs(), self.ups()), (self.downs(), self.ups(), self.ups()), (self.downs(), self.downs(), self.ups())):
            best, least = None, float("inf")
            for moves in itertools.islice(itertools.product(*kinds), _MOST_EXCHANGES):
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
        """Whether two moves are of one bond, or of one train that the first of them removes or brings back whole."""
        trains = [i for i, _, _ in moves]
        return len({move[:2] for move in moves}) < len(moves) or any(trains.count(i) > 1 and min(self.ranks[i]) < 2 for i in trains)

    def masks(self) -> Masks:
        result = []
        for full, ranks, orders in zip(self.full, self.ranks, self.order, strict=True):
            masks = [torch.zeros(size, dtype=torch.bool) for size in full]
            for mask, order, rank in zip(masks, orders, ranks, strict=True):
                mask[order[:rank]] = True
            result.append(masks)
        return result
