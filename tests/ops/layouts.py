"""Tensors with unusual memory layouts; memory between their elements is poisoned, like all uninitialized memory in tests."""

from __future__ import annotations

import torch
from torch import Tensor


def plain(tensor: Tensor) -> Tensor:
    return tensor


def within(tensor: Tensor) -> Tensor:
    """Copy to the middle of a longer buffer, one element past a vector-aligned address."""
    return torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[1:-2].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Copy to every other element of a buffer, along the last dimension."""
    return torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """Copy with the first dimension innermost."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS = [plain, within, strided, transposed]
