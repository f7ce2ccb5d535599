"""Lookups by this library's operator, whose shared library is exported beside the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_rec.ops.served_bags import Packed, ServedTable, pack, served_bags
from comera_rec.serving.portable import ServedTables


class FastTables(ServedTables):
    """Lookups by a single operator, which raises an error for an id out of range."""

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__(tables)
        self.storage, self.layout, self.slabs = map(nn.Buffer, pack(tables, dtype))

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is not None:
            return super().forward(values, lengths, weights)
        return self._bags(self.rows_of(values, lengths), lengths)

    def rows(self, values: Tensor, lengths: Tensor) -> Tensor:
        # Each value is a bag, of its own feature alone.
        lengths_FV = torch.arange(self.features)[:, None] == self.feature_of(values, lengths)
        return self._bags(self.rows_of(values, lengths), lengths_FV.long().flatten()).sum(1)

    def _bags(self, values: Tensor, lengths: Tensor) -> Tensor:
        lead = torch.zeros(lengths.shape[0] // self.features, self.columns)
        return served_bags(Packed(self.storage, self.layout, self.slabs), lead, values, lengths)[:, 1:]
