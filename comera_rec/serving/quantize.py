"""Rows of numbers in few bits: what is stored, and what a request reads of it.

w numbers in each of n rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows [n, w] as numbers of a type, and for int8 the scale of each row [n]: row = scale * numbers, from -127 to 127."""
    if dtype != torch.int8:
        return rows.to(dtype), None
    scales = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales).round().to(torch.int8), scales.squeeze(1)


class StoredRows(nn.Module):
    """Rows [n, w], read by number as float32."""

    numbers: Tensor
    scales: Tensor | None

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        numbers, scales = quantize(rows, dtype)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)

    def forward(self, index: Tensor) -> Tensor:
        """[L] -> [L, w] float32."""
        rows = self.numbers.index_select(0, index).float()
        return rows if self.scales is None else rows * self.scales.index_select(0, index).unsqueeze(1)
