"""Tables whose entries vanish while training; an entry left takes 8 bytes, value and index, and tables divide them freely.

pruning     the smallest vanish, ever more between 10 % and 50 % of the steps (cubic schedule of arXiv 1710.01878)
PEP         an entry v counts as sign(v) max(0, |v| - sigmoid(s)), with an s of its own, trained as v is, which decays toward 0
            (a threshold of 1/2) until as many entries are left as fit, at most for the usual steps. A second model starts from
            the first one's initial values, has just these entries, and is trained for the usual steps. Liu et al., arXiv
            2101.07577 (the pressure on s: Kusupati et al., arXiv 2002.03231)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.tables import Dense

CHOICES = 40
"""How often in the course of training entries are counted, and pruning chooses them anew."""
LOGITS = (-6.0, -0.1)
"""Of thresholds that no gradient reaches, before the first step and after the last."""


class Pruned(Dense):
    """A dense table of which zeros take no bytes."""

    def num_bytes(self) -> tuple[float, float]:
        kept = 4 * int(self.weight.count_nonzero())
        return kept, kept


class Thresholded(Dense):
    """PEP: a soft threshold for each entry, or a mask [M, N] of those that are left."""

    mask: Tensor | None

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim, std=(2 / (rows + dim)) ** 0.5)
        self.logits = nn.Parameter(torch.full((rows, dim), LOGITS[0]))
        self.register_buffer("mask", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        if self.mask is not None:
            return rows * F.embedding(ids, self.mask)
        return rows.sign() * F.relu(rows.abs() - F.embedding(ids, self.logits).sigmoid())

    def margins(self) -> Tensor:
        """By how much entries exceed their thresholds, [M, N]."""
        return self.weight.abs() - self.logits.sigmoid()

    def num_bytes(self) -> tuple[float, float]:
        kept = 4 * int((self.margins() if self.mask is None else self.mask).gt(0).sum())
        return kept, kept


def largest(values: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Masks of the `keep` largest entries of all tensors together, in the tensors' shapes."""
    flat = torch.cat([v.flatten() for v in values])
    mask = torch.zeros(len(flat), dtype=torch.bool).index_fill_(0, flat.topk(keep).indices, True)
    return [part.view_as(v) for part, v in zip(mask.split([v.numel() for v in values]), values, strict=True)]


class Pruning:
    """Zero the smallest entries of weights until `budget` (in parameters) holds values and indices."""

    def __init__(self, weights: Sequence[Tensor], budget: int, steps: int) -> None:
        self.weights, self.steps, self.done = weights, steps, 0
        self.total, self.final = sum(w.numel() for w in self.weights), budget // 2
        self.kept, self.masks = self.total, list[Tensor]()

    @torch.no_grad()
    def step(self) -> bool:
        """To be called after the optimizer's; zeros may come back each time that the smallest are chosen anew. False."""
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
    """Let thresholds rise until `budget` (in parameters) holds the entries above them, values and indices."""

    def __init__(self, tables: Iterable[nn.Module], budget: int, steps: int) -> None:
        self.tables = [table for table in tables if isinstance(table, Thresholded)]
        self.entries, self.steps, self.done = budget // 2, steps, 0
        self.decay = (LOGITS[1] / LOGITS[0]) ** (1 / steps)

    @torch.no_grad()
    def step(self) -> bool:
        """To be called after the optimizer's; whether few enough entries are left."""
        self.done += 1
        for table in self.tables:
            table.logits.mul_(self.decay)
        if self.done % max(1, self.steps // CHOICES):
            return False
        return sum(table.num_bytes()[0] for table in self.tables) <= 4 * self.entries

    @torch.no_grad()
    def masks(self) -> list[Tensor]:
        """Of the entries that exceed their thresholds most, as many as fit."""
        return largest([table.margins() for table in self.tables], self.entries)
