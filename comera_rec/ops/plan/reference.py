"""Steps of a plan in plain torch, on any device: sizes follow from shapes alone, and nothing waits for the device.

Where fewer unique keys turn up than fit, -1 pads them at the end. L ids, V keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor


def unique_rows(ids: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unique keys of all tables' ids in ascending order.

    Args:
        ids: per table its ids, 1-D.
        sizes: per table its rows; an id's key counts the rows of the tables before its own, so that one sort keeps each together.

    Returns:
        keys [L], padded; inverse [L]; order [L]; starts [L + 1]; see `LookupPlan`.
    """
    keys = torch.cat([table.long() + first for table, first in zip(ids, first_keys(sizes), strict=False)])
    ordered, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(ordered)
    is_first[1:] = ordered[1:] != ordered[:-1]
    place = is_first.cumsum(0) - 1
    unique = torch.full_like(ordered, -1).scatter(0, place, ordered)
    inverse = torch.empty_like(order).scatter(0, order, place)
    starts = torch.searchsorted(place, torch.arange(len(keys) + 1, device=keys.device))
    return unique, inverse, order, starts


def split_keys(keys: Tensor, left_sizes: Sequence[int], right_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys [V] over some cores -> keys over the leading ones and keys over the trailing ones of them; both may be padded.

    Args:
        keys: a key of table t is first + left * right_sizes[t] + right.
        left_sizes, right_sizes: per table how many leading and trailing keys there are.
    """
    first = first_keys([left * right for left, right in zip(left_sizes, right_sizes, strict=True)])
    bounds, *constants = _on_device(
        (first[1:], first[:-1], right_sizes, first_keys(left_sizes)[:-1], first_keys(right_sizes)[:-1]), keys.device
    )
    table = torch.searchsorted(bounds[:-1].contiguous(), keys, right=True)
    first_of, right_of, first_left, first_right = (constant[table] for constant in constants)
    local = keys - first_of
    left, right = local // right_of + first_left, local % right_of + first_right
    return torch.where(keys < 0, keys, left), torch.where(keys < 0, keys, right)


def compact_keys(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The unique ones among keys [V] in [0, size), [min(V, size)], padded; and which of them each key is, [V]."""
    is_there = torch.zeros(size + 1, dtype=torch.int64, device=keys.device).scatter(0, keys.remainder(size + 1), 1)
    is_there[size] = 0  # where padding went
    place = is_there.cumsum(0) - 1
    inverse = torch.where(keys < 0, keys, place[keys.clamp(min=0)])
    count = min(len(keys), size)
    slots = torch.where(inverse < 0, count, inverse)
    unique = torch.full((count + 1,), -1, dtype=torch.int64, device=keys.device).scatter(0, slots, keys)
    return unique[:count], inverse


def _on_device(constants: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Constants as a tensor. On an accelerator they stay there, because copying them anew would break a graph's capture."""
    rows = tuple(map(tuple, constants))
    return _kept(rows, device) if device.type == "cuda" and not torch.compiler.is_compiling() else torch.tensor(rows, device=device)


@lru_cache(maxsize=1024)
def _kept(constants: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(constants, device=device)


def first_keys(sizes: Sequence[int]) -> list[int]:
    """The first key of every table, and one beyond the last."""
    return list(accumulate(sizes, initial=0))
