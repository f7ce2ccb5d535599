"""Evaluation of a model on a whole split, and the best of a run's evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comera_rec.data import BatchLoader, ParquetBatches
from comera_rec.distributed import WORLD
from comera_rec.training.metrics import BinaryMetrics, mean_of_tasks


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
        """Record an evaluation; return whether it is the best so far."""
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
) -> dict[str, Any]:
    """Return AUC, NE, logloss and rows of a model over all batches of a split; with several processes, over the batches of all.

    Rows are weighted if they have weights. For several labels these are the means over labels, and each label has its metrics as
    `auc_LABEL`, `ne_LABEL`, `logloss_LABEL`; labels of one class on this split are left out.

    Args:
        model: called as `model(dense, sparse)`, in evaluation mode.
        between: called between two batches; what it raises ends the evaluation.
    """
    metrics = {label.name: BinaryMetrics() for label in batches.manifest.labels}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in BatchLoader(batches):
                if between is not None:
                    between()
                batch = batch.to(device)
                rows = len(batch)
                if WORLD.several:  # shares differ by a row, and processes exchange bags of equal batches
                    batch = batch.padded(int(WORLD.max(rows)))
                logits, labels = model(batch.dense, batch.sparse)[:rows], batch.labels[:rows].view(rows, -1)
                weights = None if batch.weights is None else batch.weights[:rows]
                for task, label_metrics in enumerate(metrics.values()):
                    label_metrics.update(logits[:, task], labels[:, task], weights)
    finally:
        model.train(training)
    return mean_of_tasks(metrics)
