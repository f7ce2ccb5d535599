"""Evaluation of a model on a whole split: AUC, logloss and normalized cross-entropy; and the best of a run's evaluations.

    logloss = - mean(y log p + (1 - y) log(1 - p)),  p = sigmoid(logit)
    NE      = logloss / (- (q log q + (1 - q) log(1 - q))),  q = mean(y)

NE compares the model with one that always predicts the base rate q: 1 is worthless, smaller is better. He et al., "Practical
Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.data import BatchLoader, ParquetBatches
from comera_rec.distributed import WORLD
from data_pipeline.errors import UserError

_ROWS_OF_A_PART = 1 << 16


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


class OneClass(UserError):
    """All labels of an evaluation are equal, so AUC and NE are undefined."""


class BinaryMetrics:
    """Collects logits and labels, then computes exact metrics over all of them, and over all processes.

    It keeps 12 to 24 bytes per row on the device of the logits, and takes about 40 while it sorts them: AUC is the rank statistic
    itself, not one of binned scores.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(3, 0)
        self._num_rows = 0

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            logits: before the sigmoid, of any shape.
            labels: as many, 0 or 1.
            weights: as many, at least 0: how many rows each counts as; None for 1.
        """
        end = self._num_rows + logits.numel()
        if end > self._rows.shape[1]:  # one tensor that doubles: small ones would keep others from reusing the memory of batches
            larger = torch.empty(3, max(end, 2 * self._rows.shape[1], 1 << 16), device=logits.device)
            larger[:, : self._num_rows] = self._rows[:, : self._num_rows]
            self._rows = larger
        for kept, each in zip(self._rows, (logits, labels, torch.ones_like(logits) if weights is None else weights), strict=True):
            kept[self._num_rows : end] = each.detach().flatten()
        self._num_rows = end

    def compute(self) -> dict[str, float | int]:
        """Return the metrics `auc`, `ne`, `logloss` and the number of `rows`; every process must call it, and all get the same.

        Raises:
            ValueError: for no rows, or logits that are not finite.
            OneClass: for labels of one class, for which AUC and NE are undefined.
        """
        logits, labels, weights = (WORLD.concatenate(each) for each in self._rows[:, : self._num_rows])
        if bad := sum(int((~part.isfinite()).sum()) for part in logits.split(_ROWS_OF_A_PART)):
            raise UserError(f"{bad} of {logits.numel()} logits are not finite: the model has diverged; lower its learning rates")
        # float64: a mean of 10^8 float32 losses would cost digits that runs are compared by. In parts, for memory.
        parts = zip(*(each.split(_ROWS_OF_A_PART) for each in (logits, labels, weights)), strict=True)
        loss = sum(
            float(F.binary_cross_entropy_with_logits(logit.double(), label.double(), weight.double(), reduction="sum"))
            for logit, label, weight in parts
        )
        return _metrics(*_by_score(logits, labels, weights), loss, logits.numel())


def mean_of_tasks(collected: Mapping[str, BinaryMetrics]) -> dict[str, float | int]:
    """Return one label's metrics as they are; for several labels, the means and each label's metrics as `auc_LABEL` and so on.

    Labels of one class are left out: a small split may lack a rare label.

    Raises:
        OneClass: if no label is left.
    """
    by_label: dict[str, dict[str, float | int]] = {}
    for label, metrics in collected.items():
        try:
            by_label[label] = metrics.compute()
        except OneClass:
            if label == [*collected][-1] and not by_label:
                raise
    first = next(iter(by_label.values()))
    if len(collected) == 1:
        return first
    means = {name: sum(metrics[name] for metrics in by_label.values()) / len(by_label) for name in first if name != "rows"}
    each = {f"{name}_{label}": metrics[name] for label, metrics in by_label.items() for name in means}
    return means | {"rows": first["rows"]} | each


def _by_score(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the weights [n] of negatives, and of positives, up to each distinct score: two of float64 [scores + 1], from 0 on."""
    scores, order = logits.sort()
    is_last = torch.cat([scores[1:] != scores[:-1], scores.new_ones(min(1, len(scores)), dtype=torch.bool)])
    labels, weights = labels[order], weights[order]
    del scores, order
    ends = is_last.nonzero().flatten()

    def summed(weights: Tensor) -> Tensor:
        return F.pad(weights.cumsum(0, dtype=torch.float64)[ends], (1, 0))

    return summed(weights * (1 - labels)), summed(weights * labels)


def _metrics(negatives: Tensor, positives: Tensor, loss: float, rows: int) -> dict[str, float | int]:
    """Compute metrics from sums of weights up to each distinct score, in ascending order, and the sum of weighted losses.

    AUC is the probability that a row of label 1 scores above one of label 0, where equal scores count half: the area under a
    curve of straight lines between scores, or Mann-Whitney's U.
    Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC) Curve", Radiology 1982.
    """
    weights = [float(negatives[-1]), float(positives[-1])]
    if rows == 0:
        raise UserError("no rows to evaluate; use a split that is not empty")
    if not all(weights):
        which = f"labels are {int(weights[1] > 0)}" if any(weights) else "weights are 0"
        raise OneClass(f"all {rows} {which}, so AUC and NE are undefined; evaluate on more rows")
    shares = [weight / sum(weights) for weight in weights]
    entropy = -sum(share * math.log(share) for share in shares)
    auc = float(positives.diff() @ (negatives[1:] + negatives[:-1])) / 2 / math.prod(weights)
    logloss = loss / sum(weights)
    return {"auc": auc, "ne": logloss / entropy, "logloss": logloss, "rows": rows}
