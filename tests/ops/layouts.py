"""Tensors that lie in memory in odd ways; what lies between their elements is poisoned, as all uninitialised memory is here."""

from __future__ import annotations

import torch
from torch import Tensor


def plain(tensor: Tensor) -> Tensor:
    return tensor


def within(tensor: Tensor) -> Tensor:
    """In the middle of a longer buffer, one element beyond where vectors would be aligned."""
    return torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[1:-2].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Every other element of a buffer, along the last dimension."""
    return torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """The first dimension innermost."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS = [plain, within, strided, transposed]
