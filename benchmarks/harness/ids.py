"""Random ids of tables, by Zipf's law."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def draw_ids(rows: int, count: int, exponent: float) -> Tensor:
    """Draw ids [count] of one table by Zipf's law: P(k) is proportional to (k + 1)^-exponent; exponent 0 is uniform."""
    if exponent == 0:
        return torch.randint(rows, (count,))
    cumulative = _cumulative(rows, exponent)
    return torch.searchsorted(cumulative, torch.rand(count, dtype=torch.float64) * cumulative[-1])


def draw_power_law(rows: int, count: int, exponent: float) -> Tensor:
    """Draw ids [count] of one table, much as `draw_ids` does, in memory that doesn't depend on the number of rows.

    Inverts the integral of a density proportional to x^-exponent on [1, rows + 1), and truncates; the exponent must not be 1.
    """
    last = (rows + 1.0) ** (1 - exponent)
    numbers = (1 + torch.rand(count, dtype=torch.float64) * (last - 1)).pow_(1 / (1 - exponent))
    return numbers.long().sub_(1).clamp_(0, rows - 1)


@lru_cache(maxsize=7)  # one for each table of a batch
def _cumulative(rows: int, exponent: float) -> Tensor:
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-exponent)
    return torch.cumsum(weights, 0, out=weights)
