"""Predicted cost of a training step of a linear layer, dense or TT: counted work times measured prices.

Shapes: B rows of the batch, I in_features, O out_features; a core is (r, m, n, s).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from comera_rec.tt.shape import TTShape

Tree = int | tuple["Tree", "Tree"]
"""The number of a core, or the product of two neighboring trees."""

_VECTOR = 8  # floats; fixed, so that a decision does not depend on the machine that made it


class Contraction(NamedTuple):
    """An order of products of an input x with cores: parts are formed from the cores, then x is multiplied by each part in turn."""

    parts: tuple[Tree, ...]
    """Trees that together contain every core once, in order: ((0, 1), (2, 3)) forms L and R first, (0, 1, 2, 3) joins no cores."""
    scale_rows: bool
    """Whether the rank parameters D_k between two parts scale the rows that pass between them, instead of a core."""


class LinearWork(NamedTuple):
    """Amounts of each kind of work of a forward pass, or the price of one unit of each for the whole step.

    A step is as much work as three forward passes, because the gradient of either factor of a product runs over the same indices
    as the product. So the contraction that is cheapest forward is also cheapest with its gradients, as autograd computes them.
    """

    multiplies: float
    """Multiply-adds, counted in whole vectors: the last of a row may be partly empty."""
    numbers: float
    """Numbers read or written."""
    calls: float
    """Products, copies and scalings, each with its gradients."""
    tt_layers: float
    """1 for a TT layer: flattening the input, cropping, choosing the contraction."""


NANOSECONDS = LinearWork(multiplies=0.0374, numbers=0.413, calls=20_500, tt_layers=45_400)
"""Fitted to steps of random layers on two cores of an AMD EPYC, where MKL multiplies in vectors of 8 floats. Only their
proportions matter to the choice."""


def nanoseconds(work: LinearWork) -> float:
    """Return the predicted time of a step with this work."""
    return sum(price * amount for price, amount in zip(NANOSECONDS, work, strict=True))


def dense_work(in_features: int, out_features: int, batch: int) -> LinearWork:
    """Count the work of a forward pass of `torch.nn.Linear`."""
    return _total([_product(batch, in_features, out_features)])


def contraction_work(shape: TTShape, contraction: Contraction, batch: int) -> LinearWork:
    """Count the work of a forward pass of `TTLinear`; affine in the batch."""
    return _total([LinearWork(0, 0, 0, 1), *_forming(shape, contraction), *_passing(shape, contraction, batch)])


def span(tree: Tree) -> tuple[int, int]:
    """Return (first, last + 1) of the cores of a tree."""
    return (tree, tree + 1) if isinstance(tree, int) else (span(tree[0])[0], span(tree[1])[1])


def forming_work(shape: TTShape, tree: Tree) -> LinearWork:
    """Count the work of the products that join the cores of a tree."""
    return _total(_joining(shape, tree))


def _forming(shape: TTShape, contraction: Contraction) -> Iterator[LinearWork]:
    sizes = list(map(math.prod, shape.core_shapes))
    between = {span(part)[0] for part in contraction.parts} if contraction.scale_rows else set()
    for k in set(range(1, shape.order)) - between:
        yield _elementwise(min(sizes[k - 1], sizes[k]))
    for part in contraction.parts:
        yield from _joining(shape, part)


def _joining(shape: TTShape, tree: Tree) -> Iterator[LinearWork]:
    if not isinstance(tree, int):
        for branch in tree:
            yield from _joining(shape, branch)
        (first, cut), (_, last) = map(span, tree)
        r, s = shape.bonds[first], shape.bonds[last]
        yield _product(r * _modes(shape, first, cut), shape.bonds[cut], _modes(shape, cut, last) * s)


def _passing(shape: TTShape, contraction: Contraction, batch: int) -> Iterator[LinearWork]:
    rows, rest = batch, shape.num_rows
    for part in contraction.parts:
        first, last = span(part)
        r, s = shape.bonds[first], shape.bonds[last]
        m, n = math.prod(shape.row_shape[first:last]), math.prod(shape.col_shape[first:last])
        if contraction.scale_rows and first:
            yield _elementwise(rows * rest * r)
        rest //= m
        if rest > 1 or (r > 1 and m > 1):
            yield _elementwise(rows * m * rest * r)  # a copy with the mode beside the bond
        yield _product(rows * rest, r * m, n * s)
        rows *= n


def _product(height: int, depth: int, width: int) -> LinearWork:
    numbers = height * depth + depth * width + height * width
    return LinearWork(height * depth * (-(-width // _VECTOR) * _VECTOR), numbers, 1, 0)


def _elementwise(size: int) -> LinearWork:
    return LinearWork(0, 2 * size, 1, 0)


def _total(ops: Iterable[LinearWork]) -> LinearWork:
    return LinearWork(*map(sum, zip(LinearWork(0, 0, 0, 0), *ops, strict=True)))


def _modes(shape: TTShape, first: int, last: int) -> int:
    return math.prod(shape.row_shape[first:last]) * math.prod(shape.col_shape[first:last])
