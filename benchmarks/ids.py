"""Ids of tables, drawn by Zipf's law."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def draw_ids(rows: int, count: int, exponent: float) -> Tensor:
    """[count] ids of one table by Zipf's law: id k has a probability proportional to (k + 1)^-exponent; 0 is uniform."""
    if exponent == 0:
        return torch.randint(rows, (count,))
    cumulative = _cumulative(rows, exponent)
    return torch.searchsorted(cumulative, torch.rand(count, dtype=torch.float64) * cumulative[-1])


@lru_cache(maxsize=7)  # one for each table of a batch
def _cumulative(rows: int, exponent: float) -> Tensor:
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-exponent)
    return torch.cumsum(weights, 0, out=weights)
