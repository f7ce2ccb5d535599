"""Splitting of sizes into modes, one for each core."""

import math
from functools import lru_cache

from data_pipeline.errors import UserError

MAX_ORDER = 8


def factorize(n: int, order: int) -> tuple[int, ...]:
    """Split a size into `order` balanced factors, largest first, whose product is at least `n`.

    The product is exactly `n` where exact factors sum to at most 1.25 times what the best covering factors do; otherwise the
    factors minimize (sum of factors) * (product / n).

    Args:
        n: the size, at least 1.
        order: the number of factors, 1 to 8.

    Raises:
        ValueError: if `n` or `order` is out of range.

    Example:
        >>> factorize(64, 3), factorize(1000, 2), factorize(17, 2)
        ((4, 4, 4), (40, 25), (6, 3))
    """
    require_positive(n=n)
    require_order(order)
    return tuple(sorted(_factorize(n, order), reverse=True))


@lru_cache(maxsize=65536)
def _factorize(n: int, order: int) -> tuple[int, ...]:
    if order == 1 or n == 1:
        return (n,) + (1,) * (order - 1)
    root = math.ceil(n ** (1 / order))
    window = 32 // (order - 1)  # nearly balanced factors already waste little; a wider window only costs time
    candidates = set(range(max(1, root - window), root + window + 1))
    if n <= 1_000_000:
        candidates |= {a for a in range(1, min(n, 4 * root) + 1) if n % a == 0}
    splits = [(a, *_factorize(-(-n // a), order - 1)) for a in candidates]
    covering = min(splits, key=lambda factors: (sum(factors) * math.prod(factors), max(factors)))
    exact = min((s for s in splits if math.prod(s) == n), key=sum, default=covering)
    return exact if sum(exact) <= 1.25 * sum(covering) else covering


def require_positive(**sizes: int) -> None:
    """Raise ValueError naming the first keyword whose value is not a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}: give a positive integer")


def require_order(order: int) -> None:
    """Raise ValueError unless a TT matrix can have `order` cores."""
    if isinstance(order, bool) or not isinstance(order, int) or not 1 <= order <= MAX_ORDER:
        raise UserError(f"order is {order!r}: give an integer from 1 to {MAX_ORDER}")
