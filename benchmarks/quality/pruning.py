"""Tables whose entries become zero in training; each remaining entry takes 8 bytes, value and index, in whichever table it is.

pruning     the smallest entries become zero, increasingly many from 10 % to 50 % of the steps (cubic schedule, arXiv 1710.01878)
PEP         an entry v acts as sign(v) max(0, |v| - sigmoid(s)) with its own s, which is trained like v and decays toward 0 (a
            threshold of 1/2), until the remaining entries fit the budget, at most for the usual number of steps. A second model
            starts from the first one's initial values, has only these entries, and trains for the usual number of steps. Liu et
            al., arXiv 2101.07577 (decay of s: Kusupati et al., arXiv 2002.03231)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.tables import STD, Dense

CHOICES = 40
"""How often during training the remaining entries are counted, and, by pruning, chosen again."""
LOGITS = (-6.0, -0.1)
"""Logits s, before the first step and after the last, of thresholds that receive no gradient."""


class Pruned(Dense):
    """A dense table whose zeros take no bytes."""

    def num_bytes(self) -> tuple[float, float]:
        kept = 4 * int(self.weight.count_nonzero())
        return kept, kept


class Thresholded(Dense):
    """PEP: a soft threshold for each entry, or a mask [M, N] of the remaining entries."""

    mask: Tensor | None

    def __init__(self, rows: int, dim: int, _: float = STD) -> None:
        super().__init__(rows, dim, std=(2 / (rows + dim)) ** 0.5)
        self.logits = nn.Parameter(torch.full((rows, dim), LOGITS[0]))
        self.register_buffer("mask", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        if self.mask is not None:
            return rows * F.embedding(ids, self.mask)
        return rows.sign() * F.relu(rows.abs() - F.embedding(ids, self.logits).sigmoid())

    def margins(self) -> Tensor:
        """How far entries exceed their thresholds, [M, N]."""
        return self.weight.abs() - self.logits.sigmoid()

    def num_bytes(self) -> tuple[float, float]:
        kept = 4 * int((self.margins() if self.mask is None else self.mask).gt(0).sum())
        return kept, kept


def largest(values: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Make masks, shaped like the tensors, of the `keep` largest entries of all tensors together."""
    flat = torch.cat([v.flatten() for v in values])
    mask = torch.zeros(len(flat), dtype=torch.bool).index_fill_(0, flat.topk(keep).indices, True)
    return [part.view_as(v) for part, v in zip(mask.split([v.numel() for v in values]), values, strict=True)]


class Pruning:
    """Zeroes the smallest entries of weights until values and indices fit into `budget` parameters."""

    def __init__(self, weights: Sequence[Tensor], budget: int, steps: int) -> None:
        self.weights, self.steps, self.done = weights, steps, 0
        self.total, self.final = sum(w.numel() for w in self.weights), budget // 2
        self.kept, self.masks = self.total, list[Tensor]()

    @torch.no_grad()
    def step(self) -> bool:
        """Prune; call it after the optimizer's step. Zeros may return when entries are chosen again. Always returns False."""
        self.done += 1
        if self.done % max(1, self.steps // CHOICES) == 0:
            ramp = min(1.0, max(0.0, (self.done / self.steps - 0.1) / 0.4))
            keep = int(self.final + (self.total - self.final) * (1 - ramp) ** 3)
            if keep < self.kept:
                self.kept, self.masks = keep, largest([w.abs() for w in self.weights], keep)
        for weight, mask in zip(self.weights, self.masks, strict=False):
            weight.mul_(mask)
        return False


class ThresholdSearch:
    """Raises thresholds until values and indices of the entries above them fit into `budget` parameters."""

    def __init__(self, tables: Iterable[nn.Module], budget: int, steps: int) -> None:
        self.tables = [table for table in tables if isinstance(table, Thresholded)]
        self.entries, self.steps, self.done = budget // 2, steps, 0
        self.decay = (LOGITS[1] / LOGITS[0]) ** (1 / steps)

    @torch.no_grad()
    def step(self) -> bool:
        """Return whether the remaining entries fit the budget; call it after the optimizer's step."""
        self.done += 1
        for table in self.tables:
            table.logits.mul_(self.decay)
        if self.done % max(1, self.steps // CHOICES):
            return False
        return sum(table.num_bytes()[0] for table in self.tables) <= 4 * self.entries

    @torch.no_grad()
    def masks(self) -> list[Tensor]:
        """Masks of the entries that exceed their thresholds the most, as many as fit the budget."""
        return largest([table.margins() for table in self.tables], self.entries)
