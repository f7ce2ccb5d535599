"""Splitting of sizes into modes, one for each core."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

MAX_ORDER = 8
_SKEW = 4
"""Largest ratio of a table's sizes m_k n_k. Skew lowers the rank that a budget buys, by a fifth for two cores; without this
limit the fastest shape would have rank 1."""


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


def table_modes(num_embeddings: int, embedding_dim: int, order: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """List the (row modes, column modes) that a table could take.

    Column modes are the ordered factorizations of the dim: into two factors, all of them; into three or four, those whose factors
    are within 8 or 4 times each other; where there are none, balanced factors that pad. Row modes make the sizes m_k n_k equal,
    or a few of them four times the others.

    Args:
        num_embeddings: rows M.
        embedding_dim: columns N.
        order: number of cores, 2 to 4.
    """
    skews = [skew for skew in itertools.product((1, _SKEW), repeat=order) if 1 in skew]
    modes = [(_row_modes(num_embeddings, cols, skew), cols) for cols in _column_modes(embedding_dim, order) for skew in skews]
    return list(dict.fromkeys(modes))


@lru_cache
def _column_modes(n: int, order: int) -> list[tuple[int, ...]]:
    exact = _ordered_factors(n, order)
    if order > 2:
        uneven = {3: 8, 4: 4}[order]
        exact = [modes for modes in exact if 1 not in modes and max(modes) <= uneven * min(modes)]
    return sorted(exact or set(itertools.permutations(factorize(n, order))))


def _ordered_factors(n: int, order: int) -> list[tuple[int, ...]]:
    if order == 1:
        return [(n,)]
    return [(a, *rest) for a in range(1, n + 1) if n % a == 0 for rest in _ordered_factors(n // a, order - 1)]


def _row_modes(num_embeddings: int, col_shape: tuple[int, ...], skew: tuple[int, ...]) -> tuple[int, ...]:
    """Return row modes that cover the table, with sizes m_k n_k in the proportions of `skew`."""
    shares = [times / n for times, n in zip(skew, col_shape, strict=True)]
    remaining, modes = num_embeddings, []
    for k, share in enumerate(shares[:-1]):
        unit = (remaining / math.prod(shares[k:])) ** (1 / len(shares[k:]))
        modes.append(max(1, round(unit * share)))
        remaining = -(-remaining // modes[-1])
    return (*modes, remaining)


def require_positive(**sizes: int) -> None:
    """Raise ValueError naming the first keyword whose value is not a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a positive integer")


def require_order(order: int) -> None:
    """Raise ValueError unless a TT matrix can have `order` cores."""
    if isinstance(order, bool) or not isinstance(order, int) or not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order is {order!r}: give an integer from 1 to {MAX_ORDER}")
