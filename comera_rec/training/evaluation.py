"""A model over a whole split, and which of a run's evaluations was the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comera_rec.data import BatchLoader, ParquetBatches
from comera_rec.distributed import WORLD, Processes
from comera_rec.training.metrics import BinaryMetrics, BinnedMetrics, OneClass, mean_of_tasks

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

    Rows count by their weights where they have some. A model of several labels has the means of theirs, and each one's own as
    `auc_LABEL`, `ne_LABEL`, `logloss_LABEL`; labels of one class on this split are left out.

    Args:
        model: called as `model(dense, sparse)`; in evaluation mode meanwhile.
        batches: the batches of this process.
        device: the model's.
        between: called between two batches; what it raises ends the evaluation.
        processes: that evaluate together.
    """
    kind = BinaryMetrics if batches.rows <= EXACT_ROWS else BinnedMetrics
    metrics = {label.name: kind(processes) for label in batches.manifest.labels}
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
                logits, labels = model(batch.dense, batch.sparse)[:rows], batch.labels[:rows].view(rows, -1)
                weights = None if batch.weights is None else batch.weights[:rows]
                for task, of_label in enumerate(metrics.values()):
                    of_label.update(logits[:, task], labels[:, task], weights)
    finally:
        model.train(training)
    return mean_of_tasks({name: _computed(of_label) for name, of_label in metrics.items()})


def _computed(metrics: BinaryMetrics | BinnedMetrics) -> dict[str, float | int] | OneClass:
    try:
        return metrics.compute()
    except OneClass as error:
        return error
