"""Batches of ids over several tables, drawn by Zipf's law.

Shapes: T tables, B bags of P ids each, L = B * P ids of one table, N embedding_dim, U unique ids of one table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from benchmarks.harness.ids import draw_ids

# torch 2.13 warns every user of a KeyedJaggedTensor about is_fx_tracing.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Batch:
    """Bags of one length for every table, built before timing starts, in every form that a provider reads."""

    ids: Sequence[Tensor]
    """T tensors [L]."""
    offsets: Tensor
    """[B + 1], the same for all tables."""
    features: KeyedJaggedTensor
    """The whole batch in TorchRec's form."""

    @classmethod
    def draw(cls, rows: Sequence[int], bags: int, bag: int, exponent: float, device: str) -> Batch:
        """Draw a batch for tables with these numbers of rows; their features are "f0", "f1", ..."""
        values = torch.cat([draw_ids(count, bags * bag, exponent) for count in rows]).to(device)
        features = KeyedJaggedTensor(
            keys=[f"f{t}" for t in range(len(rows))],
            values=values,
            lengths=torch.full((len(rows) * bags,), bag, device=device),
        )
        return cls(values.split(bags * bag), torch.arange(0, bags * bag + 1, bag, device=device), features)

    @cached_property
    def unique_ids(self) -> list[Tensor]:
        """T tensors [U]: the unique ids of each table, ascending."""
        return [ids.unique() for ids in self.ids]

    def unique_rows(self, tables: Sequence[Tensor]) -> Tensor:
        """Those rows of T tables [M, N], end to end: [sum of U, N]."""
        return torch.cat([table[ids_U] for table, ids_U in zip(tables, self.unique_ids, strict=True)])
