"""The definition of a plan in plain torch, on any device: sizes depend only on shapes, and nothing waits for the device.

L ids, K keys, T tables. Keys are numbered through all tables, and -1 is padding at the end.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def plan_lookup(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the fields of a `LookupPlan` as int64, from 1-D ids in range and the row modes of each table."""
    cut = (len(row_shapes[0]) + 1) // 2
    leading, trailing = [shape[:cut] for shape in row_shapes], [shape[cut:] for shape in row_shapes]
    keys, inverse, order, starts = unique_rows(ids, _sizes(row_shapes))
    p, q = split_keys(keys, _sizes(leading), _sizes(trailing))
    none = keys.new_empty(0)
    left = right = (none, none)
    left_keys = right_keys = none
    if len(leading[0]) == 2:
        left_keys, p = compact_keys(p, sum(_sizes(leading)))
        left = _slices(left_keys, leading)
    if len(trailing[0]) == 2:
        right_keys, q = compact_keys(q, sum(_sizes(trailing)))
        inner, outer = _slices(right_keys, trailing)
        right = outer, inner
    bounds = [
        _bounds(keys, _sizes(row_shapes)),
        _bounds(left_keys, _sizes(leading)),
        _bounds(right_keys, _sizes(trailing)),
        *on_device([first_keys(modes) for modes in zip(*row_shapes, strict=True)], keys.device),
    ]
    return inverse, order, starts, torch.stack([p, q]), _padded(left, keys), _padded(right, keys), torch.stack(bounds)


def unique_rows(ids: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the unique keys of all tables' ids, in ascending order.

    Args:
        ids: 1-D ids of each table.
        sizes: rows of each table; an id's key is the id plus the rows of all earlier tables, so one sort keeps tables apart.

    Returns:
        keys [L], padded; inverse [L]; order [L]; starts [L + 1]; see `LookupPlan`.
    """
    *firsts, size = first_keys(sizes)
    if all(table.shape[0] == ids[0].shape[0] for table in ids[1:]):
        keys = (torch.stack(list(ids)) + on_device([firsts], ids[0].device).view(-1, 1)).flatten()
    else:
        keys = torch.cat([table.long() + first for table, first in zip(ids, firsts, strict=True)])
    # A radix sort takes one pass per byte.
    ordered, order = torch.sort(keys.int() if size <= torch.iinfo(torch.int32).max else keys, stable=True)
    ordered = ordered.long()
    is_first = torch.ones_like(ordered)
    is_first[1:] = ordered[1:] != ordered[:-1]
    number = is_first.cumsum(0) - 1
    unique = torch.full_like(ordered, -1).scatter(0, number, ordered)
    inverse = torch.empty_like(order).scatter(0, order, number)
    starts = torch.searchsorted(number, torch.arange(keys.shape[0] + 1, device=keys.device))
    return unique, inverse, order, starts


def split_keys(keys: Tensor, left_sizes: Sequence[int], right_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Split keys [K] over neighboring cores into keys over the leading cores and keys over the trailing cores; padding stays.

    Args:
        keys: a key of table t is first + left * right_sizes[t] + right.
        left_sizes, right_sizes: number of leading and trailing keys of each table.
    """
    first = first_keys([left * right for left, right in zip(left_sizes, right_sizes, strict=True)])
    bounds, *constants = on_device(
        (first[1:], first[:-1], right_sizes, first_keys(left_sizes)[:-1], first_keys(right_sizes)[:-1]), keys.device
    )
    table = torch.searchsorted(bounds[:-1].contiguous(), keys, right=True)
    first_of, right_of, first_left, first_right = (constant[table] for constant in constants)
    local = keys - first_of
    left, right = local // right_of + first_left, local % right_of + first_right
    return torch.where(keys < 0, keys, left), torch.where(keys < 0, keys, right)


def compact_keys(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the unique keys among keys [K] in [0, size), [min(K, size)] padded; and the number of each key among them, [K]."""
    is_present = torch.zeros(size + 1, dtype=torch.int64, device=keys.device).scatter(0, keys.remainder(size + 1), 1)
    number = is_present[:size].cumsum(0) - 1  # the last entry is that of padding
    inverse = torch.where(keys < 0, keys, number[keys.clamp(min=0)])
    count = min(keys.shape[0], size)
    slots = torch.where(inverse < 0, count, inverse)
    unique = torch.full((count + 1,), -1, dtype=torch.int64, device=keys.device).scatter(0, slots, keys)
    return unique[:count], inverse


def _slices(keys: Tensor, modes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Split keys over two cores into slices of each."""
    return split_keys(keys, [first for first, _ in modes], [second for _, second in modes])


def _padded(halves: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
    """Stack and pad two halves to [2, K], or to [2, 0] if they are empty."""
    length = keys.shape[0] if halves[0].shape[0] else 0
    return torch.stack([torch.cat([half, half.new_full((length - half.shape[0],), -1)]) for half in halves])


def _bounds(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """Count the keys before each table's first, and all keys: [T + 1]. Keys ascend, except for padding."""
    (firsts,) = on_device([first_keys(sizes)], keys.device)
    return torch.searchsorted(torch.where(keys < 0, first_keys(sizes)[-1], keys), firsts)


def _sizes(modes: Sequence[Sequence[int]]) -> list[int]:
    return [math.prod(shape) for shape in modes]


def on_device(constants: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return constants as a tensor. On a GPU it is cached, because copying constants again would break a graph's capture."""
    key = tuple(map(tuple, constants)), device
    if device.type != "cuda" or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():  # of fake tensors
        return torch.tensor(key[0], device=device)
    return _CAPTURED[key] if key in _CAPTURED else kept(_cached(*key), key)


def kept(constants: Tensor, key: Hashable = None) -> Tensor:
    """Return constants, and keep them forever, under a key, if a graph is being captured, which reads them at their address."""
    if constants.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED[key or constants.data_ptr()] = constants
    return constants


_CAPTURED: dict[Hashable, Tensor] = {}


@lru_cache(maxsize=4096)
def _cached(constants: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(constants, device=device)


def first_keys(sizes: Sequence[int]) -> list[int]:
    """Return the first key of every table, and the number of all keys."""
    return list(accumulate(sizes, initial=0))
