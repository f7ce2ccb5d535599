"""A model over a whole split, and which of a run's evaluations was the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comera_rec.data import BatchLoader, ParquetBatches
from comera_rec.distributed import WORLD, Processes
from comera_rec.training.metrics import BinaryMetrics, BinnedMetrics

EXACT_ROWS = 5_000_000  # above it AUC is binned: the exact one sorts all rows, at about 50 bytes each


@dataclass
class BestSoFar:
    """The lowest validation NE of a run.

    Attributes:
        step: when it was measured; None before the first.
        ne: the NE.
        since: evaluations since then.
    """

    step: int | None = None
    ne: float | None = None
    since: int = 0

    def observe(self, step: int, ne: float) -> bool:
        """Take note of an evaluation; whether it is the best."""
        if self.ne is not None and ne >= self.ne:
            self.since += 1
            return False
        self.step, self.ne, self.since = step, ne, 0
        return True


def evaluate(
    model: nn.Module,
    batches: ParquetBatches,
    device: torch.device,
    *,
    between: Callable[[], object] | None = None,
    processes: Processes = WORLD,
) -> dict[str, Any]:
    """AUC, NE, logloss and rows of a model over all batches of a split; with several processes, over the batches of all.

    Args:
        model: called as `model(dense, sparse)`; in evaluation mode meanwhile.
        batches: the batches of this process.
        device: the model's.
        between: called between two batches; what it raises ends the evaluation.
        processes: that evaluate together.
    """
    metrics = BinaryMetrics(processes) if batches.rows <= EXACT_ROWS else BinnedMetrics(processes)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in BatchLoader(batches):
                if between is not None:
                    between()
                batch = batch.to(device)
                rows = len(batch)
                if processes.several:  # shares differ by a row, and processes exchange bags of equal batches
                    batch = batch.padded(int(processes.max(rows)))
                metrics.update(model(batch.dense, batch.sparse).squeeze(1)[:rows], batch.labels[:rows])
    finally:
        model.train(training)
    return metrics.compute()
