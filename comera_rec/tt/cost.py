"""What a linear layer costs: the work of a forward pass in multiply-adds.

A training step is as much work as three forward passes, because the gradient of either factor of a product runs over the same
indices as the product.
"""

import itertools
import math

from comera_rec.tt.shape import TTShape

_VECTOR = 8  # floats; fixed, so that a choice doesn't depend on the machine that makes it
NUMBER = _VECTOR  # multiply-adds that cost as much as reading or writing a number: one instruction's
CALL = 1 << 19  # and those that cost as much as starting an operation
LAYER = 2 * CALL  # a TT layer looks up its parameters and crops its factors


def tt_cost(shape: TTShape, batch: int) -> int:
    """Return the cost of `TTLinear`: L (I x r) and R (r x O) are formed from the cores, then multiply the input."""
    sizes = list(map(math.prod, shape.core_shapes))
    scaling = sum(_elementwise(min(pair)) for pair in itertools.pairwise(sizes))
    forming, bonds, cut = 0, shape.bonds, shape.num_input_modes
    for first, last in ((0, cut), (cut, shape.order)):
        for k in range(first + 1, last):
            left, right = (math.prod(shape.row_shape[a:b] + shape.col_shape[a:b]) for a, b in ((first, k), (k, k + 1)))
            forming += _product(bonds[first] * left, bonds[k], right * bonds[k + 1])
    return LAYER + scaling + forming + _product(batch, shape.num_rows, bonds[cut]) + _product(batch, bonds[cut], shape.num_cols)


def dense_cost(in_features: int, out_features: int, batch: int) -> int:
    """Return the cost of `torch.nn.Linear`."""
    return _product(batch, in_features, out_features)


def _product(height: int, depth: int, width: int) -> int:
    multiplies = height * depth * (-(-width // _VECTOR) * _VECTOR)  # in whole vectors: the last of a row may be partly empty
    return multiplies + NUMBER * (height * depth + depth * width + height * width) + CALL


def _elementwise(size: int) -> int:
    return NUMBER * 2 * size + CALL
