"""The definition of a plan in plain torch, on any device, in which every id has a row of its own; and constants on devices.

Sizes depend only on shapes, and nothing waits for the device. L ids, T tables.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from comera_rec.tt import row_digits


def plan_lookup(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the fields of a `LookupPlan` as int64, from 1-D ids in range and the row modes of each table."""
    order = len(row_shapes[0])
    firsts = [first_keys(modes) for modes in zip(*row_shapes, strict=True)]
    digits = zip(*(row_digits(table.long(), shape) for table, shape in zip(ids, row_shapes, strict=True)), strict=True)
    slices = [
        torch.cat([digit + first for digit, first in zip(of_tables, of_core, strict=False)])
        for of_tables, of_core in zip(digits, firsts, strict=True)
    ]
    numbers = torch.arange(slices[0].shape[0], device=slices[0].device)
    none, starts = numbers.new_empty(2, 0), torch.arange(slices[0].shape[0] + 1, device=numbers.device)
    p = slices[0] if order < 3 else numbers
    q = (torch.zeros_like(numbers), *slices[1:3], numbers)[order - 1]
    left = torch.stack(slices[:2]) if order > 2 else none
    right = torch.stack([slices[3], slices[2]]) if order > 3 else none
    of_ids = first_keys([table.shape[0] for table in ids])
    of_halves = [of_ids if order > least else [0] * len(of_ids) for least in (2, 3)]
    bounds = on_device([of_ids, *of_halves, *firsts], numbers.device)
    return numbers, numbers, starts, torch.stack([p, q]), left, right, bounds


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
