"""Mixed-radix digits: which slice of each core a row of the table uses. Pure index arithmetic."""

import math
from collections.abc import Sequence

from torch import Tensor


def row_digits(rows: Tensor, row_shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the digits (i_1..i_d) of row ids in the mixed radix (m_1..m_d), most significant first.

    Args:
        rows: integer ids of any shape, each in [0, m_1...m_d).
        row_shape: the radices (m_1..m_d).

    Returns:
        d tensors of the shape of `rows`, the k-th in [0, m_k).
    """
    digits = []
    for k in range(len(row_shape)):
        weight = math.prod(row_shape[k + 1 :])
        digits.append(rows // weight % row_shape[k])
    return tuple(digits)
