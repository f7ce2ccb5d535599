"""The order in which a TT linear layer contracts its input with its cores: the cheapest for each batch size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from comera_rec.tt.linear_cost import Contraction, Tree, contraction_work, dense_work, forming_work, nanoseconds
from comera_rec.tt.shape import TTShape

Contractions = tuple[tuple[float, Contraction], ...]
"""(largest batch, contraction) pairs by rising batch; the last serves any batch."""

_SWITCH_BELOW = 0.9
"""Share of the time below which another contraction is worth its cost: torch.compile compiles each one separately."""


@lru_cache(maxsize=4096)
def best_contractions(shape: TTShape) -> Contractions:
    """Return, for every batch size, a contraction within about a tenth of the cheapest.

    For large batches it forms L (I x r) and R (r x O) once (CoMERA, section 4.2, arXiv 2405.14377), or all of W where r is
    large; for small batches it multiplies the input by one core after another. All candidates are tried.

    Args:
        shape: the shape of a linear layer, input modes first.
    """
    lines = {each: _line(shape, each) for each in candidate_contractions(shape)}

    def cost(contraction: Contraction, batch: int) -> float:
        fixed, per_row = lines[contraction]
        return fixed + per_row * batch

    best = min(lines, key=lambda each: lines[each][::-1])
    contractions: Contractions = ((math.inf, best),)
    for batch in (2**exponent for exponent in range(20, -1, -1)):
        best = min(lines, key=lambda each: cost(each, batch))
        if cost(best, batch) < _SWITCH_BELOW * cost(contractions[0][1], batch):
            contractions = ((batch, best), *contractions)
    return contractions


def contraction_for(contractions: Contractions, batch: int) -> Contraction:
    """Return the contraction for a batch of `batch` rows."""
    return next(contraction for limit, contraction in contractions if batch <= limit)


def tt_milliseconds(shape: TTShape, batch: int) -> float:
    """Predict the time of a training step of `TTLinear`, forward and backward, in milliseconds."""
    contraction = contraction_for(best_contractions(shape), batch)
    return nanoseconds(contraction_work(shape, contraction, batch)) / 1e6


def dense_milliseconds(in_features: int, out_features: int, batch: int) -> float:
    """Predict the time of a training step of `torch.nn.Linear`, forward and backward, in milliseconds."""
    return nanoseconds(dense_work(in_features, out_features, batch)) / 1e6


def _line(shape: TTShape, contraction: Contraction) -> tuple[float, float]:
    """Return the nanoseconds of a step at batch 0, and those that each row adds."""
    empty, one = (nanoseconds(contraction_work(shape, contraction, batch)) for batch in (0, 1))
    return empty, one - empty


def candidate_contractions(shape: TTShape) -> Iterator[Contraction]:
    """Yield every way to cut the cores into parts, each formed by its cheapest products.

    The rank parameters D between parts scale either cores or rows.
    """
    inner = range(1, shape.order)
    for count in range(shape.order):
        for cuts in itertools.combinations(inner, count):
            parts = tuple(_cheapest_tree(shape, *ends) for ends in itertools.pairwise((0, *cuts, shape.order)))
            yield from (Contraction(parts, scale_rows) for scale_rows in ((False, True) if cuts else (False,)))


@lru_cache(maxsize=65536)
def _cheapest_tree(shape: TTShape, first: int, last: int) -> Tree:
    """Return the cheapest order in which to join neighboring cores, as for a product of a chain of matrices."""
    if last - first == 1:
        return first
    trees = [(_cheapest_tree(shape, first, cut), _cheapest_tree(shape, cut, last)) for cut in range(first + 1, last)]
    return min(trees, key=lambda tree: nanoseconds(forming_work(shape, tree)))
