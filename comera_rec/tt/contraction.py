"""The order in which a TT linear layer contracts its input with its cores: the cheapest for each batch size.

A cost is the work of a forward pass in multiply-adds. A training step is as much work as three forward passes, because the gradient
of either factor of a product runs over the same indices as the product. So the contraction that is cheapest forward is also the
cheapest with its gradients, as autograd computes them.

Shapes: B rows of the batch, I in_features, O out_features; a core is (r, m, n, s).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from comera_rec.tt.shape import TTShape

Tree = int | tuple["Tree", "Tree"]
"""The number of a core, or the product of two neighboring trees."""

_VECTOR = 8  # floats; fixed, so that a choice doesn't depend on the machine that makes it
NUMBER = _VECTOR  # multiply-adds that cost as much as reading or writing a number: one instruction's
CALL = 1 << 19  # and those that cost as much as starting an operation
LAYER = 2 * CALL  # a TT layer flattens the input, crops it and chooses the contraction
_SWITCH_BELOW = 0.9
"""Share of the cost below which another contraction is worth it: torch.compile compiles each one separately."""


class Contraction(NamedTuple):
    """An order of products of an input x with cores: parts are formed from the cores, then x is multiplied by each part in turn."""

    parts: tuple[Tree, ...]
    """Trees that together contain every core once, in order: ((0, 1), (2, 3)) forms L and R first, (0, 1, 2, 3) joins no cores."""
    scale_rows: bool
    """Whether the rank parameters D_k between two parts scale the rows that pass between them, instead of a core."""


Contractions = tuple[tuple[float, Contraction], ...]
"""(largest batch, contraction) pairs by rising batch; the last serves any batch."""


@lru_cache(maxsize=4096)
def best_contractions(shape: TTShape) -> Contractions:
    """Return, for every batch size, a contraction within about a tenth of the cheapest.

    For large batches it forms L (I x r) and R (r x O) once (CoMERA, section 4.2, arXiv 2405.14377), or all of W where r is
    large; for small batches it multiplies the input by one core after another. All candidates are tried.

    Args:
        shape: the shape of a linear layer, input modes first.
    """
    lines = {}  # cost at batch 0, and what each row adds
    for each in candidate_contractions(shape):
        fixed = contraction_cost(shape, each, 0)
        lines[each] = fixed, contraction_cost(shape, each, 1) - fixed

    def cost(contraction: Contraction, batch: int) -> int:
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


def tt_cost(shape: TTShape, batch: int) -> int:
    """Return the cost of `TTLinear` in the contraction that it chooses."""
    return contraction_cost(shape, contraction_for(best_contractions(shape), batch), batch)


def dense_cost(in_features: int, out_features: int, batch: int) -> int:
    """Return the cost of `torch.nn.Linear`."""
    return _product(batch, in_features, out_features)


def contraction_cost(shape: TTShape, contraction: Contraction, batch: int) -> int:
    """Return the cost of `TTLinear` in a given contraction; affine in the batch."""
    sizes = list(map(math.prod, shape.core_shapes))
    between = {span(part)[0] for part in contraction.parts} if contraction.scale_rows else set()
    scaling = sum(_elementwise(min(sizes[k - 1], sizes[k])) for k in set(range(1, shape.order)) - between)
    return LAYER + scaling + sum(_joining(shape, part) for part in contraction.parts) + _passing(shape, contraction, batch)


def span(tree: Tree) -> tuple[int, int]:
    """Return (first, last + 1) of the cores of a tree."""
    return (tree, tree + 1) if isinstance(tree, int) else (span(tree[0])[0], span(tree[1])[1])


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
    return min(trees, key=lambda tree: _joining(shape, tree))


def _joining(shape: TTShape, tree: Tree) -> int:
    """Return the cost of the products that join the cores of a tree."""
    if isinstance(tree, int):
        return 0
    (first, cut), (_, last) = map(span, tree)
    left, right = (math.prod(shape.row_shape[a:b] + shape.col_shape[a:b]) for a, b in ((first, cut), (cut, last)))
    product = _product(shape.bonds[first] * left, shape.bonds[cut], right * shape.bonds[last])
    return product + sum(_joining(shape, branch) for branch in tree)


def _passing(shape: TTShape, contraction: Contraction, batch: int) -> int:
    """Return the cost of multiplying the input by one part after the other."""
    cost, rows, rest = 0, batch, shape.num_rows
    for part in contraction.parts:
        first, last = span(part)
        r, s = shape.bonds[first], shape.bonds[last]
        m, n = math.prod(shape.row_shape[first:last]), math.prod(shape.col_shape[first:last])
        if contraction.scale_rows and first:
            cost += _elementwise(rows * rest * r)
        rest //= m
        if rest > 1 or (r > 1 and m > 1):
            cost += _elementwise(rows * m * rest * r)  # a copy with the mode beside the bond
        cost += _product(rows * rest, r * m, n * s)
        rows *= n
    return cost


def _product(height: int, depth: int, width: int) -> int:
    multiplies = height * depth * (-(-width // _VECTOR) * _VECTOR)  # in whole vectors: the last of a row may be partly empty
    return multiplies + NUMBER * (height * depth + depth * width + height * width) + CALL


def _elementwise(size: int) -> int:
    return NUMBER * 2 * size + CALL
