"""Metrics of click prediction over a whole evaluation: AUC, logloss and normalized cross-entropy.

    logloss = - mean(y log p + (1 - y) log(1 - p)),  p = sigmoid(logit)
    NE      = logloss / (- (q log q + (1 - q) log(1 - q))),  q = mean(y)

NE compares the model with one that always predicts the base rate q: 1 is worthless, smaller is better. He et al., "Practical
Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from comera_rec.distributed import WORLD, Processes


class BinaryMetrics:
    """Collects logits and labels, then computes exact metrics over all of them, and over all processes.

    It keeps 8 bytes per row on the device of the logits: AUC is the rank statistic itself, not one of binned scores.

    Args:
        processes: each with rows of its own.
    """

    def __init__(self, processes: Processes = WORLD) -> None:
        self._processes = processes
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (any shape, before the sigmoid) and as many labels of 0 or 1; ValueError if the counts differ."""
        _check_counts(logits, labels)
        self._logits.append(logits.detach().flatten().float())
        self._labels.append(labels.detach().flatten().float())

    def compute(self) -> dict[str, float | int]:
        """The metrics `auc`, `ne`, `logloss` and the number of `rows` they are of; every process must call it, and gets the same.

        Raises:
            ValueError: no rows; logits that are not finite; only one class among the labels, where AUC and NE are undefined.
        """
        logits = torch.cat(self._logits) if self._logits else torch.empty(0)
        labels = torch.cat(self._labels) if self._labels else torch.empty(0)
        logits, labels = self._processes.concatenate(logits), self._processes.concatenate(labels)
        # float64: a mean of 10^8 float32 losses would cost digits that runs are compared by.
        logits, labels = logits.double(), labels.double()
        positives, bad = int(labels.sum()), int((~logits.isfinite()).sum())
        _check(labels.numel(), positives, bad)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return {"auc": area_under_curve(logits, labels), **_of_losses(float(loss), labels.numel(), positives)}


class BinnedMetrics:
    """The same in constant memory (16 MiB), whatever the rows: AUC is that of logits rounded to bins of 2^-14 between -32 and 32.

    Rows of a bin count as equal, so AUC errs by at most half of the share of pairs that fall into one bin, which `compute` returns
    as `auc_error`. All else is exact.
    """

    LIMIT, BINS = 32, 1 << 20

    def __init__(self, processes: Processes = WORLD) -> None:
        self._processes = processes
        self._counts = torch.zeros(2, self.BINS, dtype=torch.int64)  # rows by label and bin
        self._sums = torch.zeros(2, dtype=torch.float64)  # of losses, and of logits that are not finite

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """As `BinaryMetrics.update`."""
        _check_counts(logits, labels)
        logits, labels = logits.detach().flatten().double().cpu(), labels.detach().flatten().double().cpu()
        bins = ((logits + self.LIMIT) * (self.BINS / (2 * self.LIMIT))).nan_to_num().clamp(0, self.BINS - 1).long()
        self._counts.view(-1).scatter_add_(0, bins + labels.long() * self.BINS, torch.ones_like(bins))
        self._sums[0] += binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self._sums[1] += (~logits.isfinite()).sum()

    def compute(self) -> dict[str, float | int]:
        """As `BinaryMetrics.compute`, and `auc_error`."""
        counts, sums = self._processes.sum(self._counts), self._processes.sum(self._sums)
        negatives, positives = (int(count) for count in counts.sum(1))
        _check(negatives + positives, positives, int(sums[1]))
        of_negatives, of_positives = counts.double()
        pairs = float(negatives) * positives
        below = of_negatives.cumsum(0) - of_negatives / 2
        return {
            "auc": float(of_positives @ below) / pairs,
            "auc_error": float(of_positives @ of_negatives) / 2 / pairs,
            **_of_losses(float(sums[0]), negatives + positives, positives),
        }


def _check_counts(logits: Tensor, labels: Tensor) -> None:
    if logits.numel() != labels.numel():
        raise ValueError(f"logits and labels must be equally many, got {tuple(logits.shape)} and {tuple(labels.shape)}")


def _check(rows: int, positives: int, bad: int) -> None:
    if rows == 0:
        raise ValueError("no rows to evaluate; use a split that is not empty")
    if bad:
        raise ValueError(f"{bad} of {rows} logits are not finite: the model has diverged; lower its rates")
    if positives in (0, rows):
        raise ValueError(f"all {rows} labels are {int(positives > 0)}, so AUC and NE are undefined; evaluate on more rows")


def _of_losses(loss: float, rows: int, positives: int) -> dict[str, float | int]:
    """From the sum of the rows' losses."""
    base_rate = positives / rows
    entropy = -(base_rate * math.log(base_rate) + (1 - base_rate) * math.log(1 - base_rate))
    return {"ne": loss / rows / entropy, "logloss": loss / rows, "rows": rows}


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
