"""Metrics of click prediction over a whole evaluation: AUC, logloss and normalized cross-entropy.

    logloss = - mean(y log p + (1 - y) log(1 - p)),  p = sigmoid(logit)
    NE      = logloss / (- (q log q + (1 - q) log(1 - q))),  q = mean(y)

NE compares the model with one that always predicts the base rate q: 1 is worthless, smaller is better. He et al., "Practical
Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


class BinaryMetrics:
    """Collects logits and labels, then computes exact metrics over all of them, and over all ranks under torch.distributed.

    It keeps 8 bytes per row on the device of the logits: AUC is the rank statistic itself, not one of binned scores.
    """

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (any shape, before the sigmoid) and as many labels of 0 or 1; ValueError if the counts differ."""
        if logits.numel() != labels.numel():
            raise ValueError(f"logits and labels must be equally many, got {tuple(logits.shape)} and {tuple(labels.shape)}")
        self._logits.append(logits.detach().flatten().float())
        self._labels.append(labels.detach().flatten().float())

    def compute(self) -> dict[str, float | int]:
        """The metrics `auc`, `ne`, `logloss` and the number of `rows` they are of; every rank must call it, and gets the same.

        Raises:
            ValueError: no rows; logits that are not finite; only one class among the labels, where AUC and NE are undefined.
        """
        logits = torch.cat(self._logits) if self._logits else torch.empty(0)
        labels = torch.cat(self._labels) if self._labels else torch.empty(0)
        if dist.is_available() and dist.is_initialized():
            logits, labels = _gather(logits), _gather(labels)
        rows, positives = labels.numel(), int(labels.sum(dtype=torch.float64))
        if rows == 0:
            raise ValueError("no rows to evaluate; use a split that is not empty")
        if not logits.isfinite().all():
            raise ValueError(
                f"{int((~logits.isfinite()).sum())} of {rows} logits are not finite: the model has diverged; lower its rates"
            )
        if positives in (0, rows):
            raise ValueError(f"all {rows} labels are {int(positives > 0)}, so AUC and NE are undefined; evaluate on more rows")
        # float64: a mean of 10^8 float32 losses would cost digits that runs are compared by.
        logits, labels = logits.double(), labels.double()
        logloss = binary_cross_entropy_with_logits(logits, labels)
        base_rate = labels.mean()
        entropy = -(base_rate.log() * base_rate + (1 - base_rate).log() * (1 - base_rate))
        return {
            "auc": area_under_curve(logits, labels),
            "ne": float(logloss / entropy),
            "logloss": float(logloss),
            "rows": rows,
        }


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """The probability that a row of label 1 scores above one of label 0, where equal scores count half: Mann-Whitney's U.

    Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC) Curve", Radiology 1982.

    Args:
        scores: [n] in any order.
        labels: [n], 0 or 1, both of them present.
    """
    _, score_of_row, rows = scores.unique(return_inverse=True, return_counts=True)
    mean_rank = rows.cumsum(0) - (rows - 1) / 2.0  # of equal scores, from 1
    positives = labels.sum(dtype=torch.float64)
    above = (mean_rank.double()[score_of_row] * labels).sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def _gather(values: Tensor) -> Tensor:
    """The values [n] of all ranks, one after the other; n may differ, and all_gather wants equal sizes."""
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    largest = int(torch.cat(counts).max())
    parts = [values.new_empty(largest) for _ in counts]
    dist.all_gather(parts, torch.cat([values, values.new_zeros(largest - len(values))]))
    return torch.cat([part[: int(n)] for part, n in zip(parts, counts, strict=True)])
