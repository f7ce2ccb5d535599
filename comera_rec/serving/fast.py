"""Lookups by this library's operator, whose shared library is exported beside the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_rec.ops.served_bags import Packed, ServedTable, pack, served_bags


class FastTables(nn.Module):
    """`PortableTables` as a single operator; raises an error where that returns NaN."""

    storage: Tensor
    layout: Tensor
    slabs: Tensor

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__()
        for name, tensor in pack(tables, dtype)._asdict().items():
            self.register_buffer(name, tensor)

    def forward(self, lead: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return served_bags(Packed(self.storage, self.layout, self.slabs), lead, values, lengths)
