"""How sizes split into modes, one a core."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

MAX_ORDER = 8
_SKEW = 4
"""Largest over smallest m_k n_k of a table. Skew lowers the rank that a budget buys, of two cores by a fifth. Ever
more skew would be ever faster, down to rank 1."""


def factorize(n: int, order: int) -> tuple[int, ...]:
    """Split a size into `order` balanced factors, largest first, whose product is at least `n`.

    Exact wherever the size has divisors nearly as balanced as the best covering factors (within 25 % of their sum); otherwise
    the factors minimize (sum of factors) * (product / n).

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
    window = 32 // (order - 1)  # near-balanced products already waste little; wider windows only cost time
    candidates = set(range(max(1, root - window), root + window + 1))
    if n <= 1_000_000:
        candidates |= {a for a in range(1, min(n, 4 * root) + 1) if n % a == 0}
    splits = [(a, *_factorize(-(-n // a), order - 1)) for a in candidates]
    covering = min(splits, key=lambda factors: (sum(factors) * math.prod(factors), max(factors)))
    exact = min((s for s in splits if math.prod(s) == n), key=sum, default=covering)
    return exact if sum(exact) <= 1.25 * sum(covering) else covering


def table_modes(num_embeddings: int, embedding_dim: int, order: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Row and column modes that a table could take.

    Column modes are ordered factorizations of the dim: all of two modes, those of three within a factor of 8 of each other, those
    of four within 4; where there are none, balanced ones that pad. Row modes make the sizes m_k n_k equal, or some of them four
    times the others.

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
    """Row modes that cover the table, with sizes m_k n_k in the proportions of `skew`."""
    shares = [times / n for times, n in zip(skew, col_shape, strict=True)]
    left, modes = num_embeddings, []
    for k, share in enumerate(shares[:-1]):
        unit = (left / math.prod(shares[k:])) ** (1 / len(shares[k:]))
        modes.append(max(1, round(unit * share)))
        left = -(-left // modes[-1])
    return (*modes, left)


def require_positive(**sizes: int) -> None:
    """Raise a ValueError that names the first of the given sizes that is not a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a positive integer")


def require_order(order: int) -> None:
    """Raise a ValueError unless a train can have that many cores."""
    if isinstance(order, bool) or not isinstance(order, int) or not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order is {order!r}: give an integer from 1 to {MAX_ORDER}")
