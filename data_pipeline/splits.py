"""Which split a row belongs to: by its place in the logs, by its log, or by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data_pipeline.manifest import SPLITS

SplitKind = Literal["chronological", "day", "random"]
Rows = slice | np.ndarray  # of indices, ascending


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """How rows are told apart.

    chronological: the last `test` of the rows are the test split, the `val` before them are for validation; both rounded down.
    day: all logs but the last train; the first half of the last one (rounded up) validates, the rest tests, as is the convention
        for Criteo's terabyte.
    random: each row is drawn on its own by a hash of the seed, its log and where it begins in the log's text, so that shares hold
        on average, and neither workers nor the size of parts play a role. With the default fractions, 8 : 1 : 1 as in BARS.
    """

    kind: SplitKind = "chronological"
    val: float = 0.1
    test: float = 0.1
    seed: int = 0

    @classmethod
    def recorded(cls, options: Mapping[str, Any]) -> Splitting:
        """From a manifest's options; where they name a split, that takes all rows."""
        kind = options["split"]
        if kind in SPLITS:
            return cls(val=float(kind == "val"), test=float(kind == "test"))
        names = {"val_fraction": "val", "test_fraction": "test", "seed": "seed"}
        return cls(kind=kind, **{argument: options[name] for name, argument in names.items() if name in options})

    def drawn(self, log: int, starts: np.ndarray) -> np.ndarray:
        """Random splits of rows, as numbers in SPLITS: int8 [n] for where they begin in their log, int64 [n]."""
        key = _mix64(np.array([self.seed], np.uint64) ^ _mix64(np.array([log], np.uint64)))
        uniform = (_mix64(starts.astype(np.uint64) ^ key) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return np.searchsorted([1 - self.val - self.test, 1 - self.test], uniform, side="right").astype(np.int8)

    def bounds(self, rows_of_logs: Sequence[int]) -> tuple[int, int]:
        """Of a split by place: how many rows come before the first of validation and of the test."""
        total = sum(rows_of_logs)
        if self.kind == "day":
            return total - rows_of_logs[-1], total - rows_of_logs[-1] // 2
        # Rounding first keeps 0.29 * 100 = 28.999999999999996 from losing a row.
        val, test = (math.floor(round(total * fraction, 6)) for fraction in (self.val, self.test))
        return total - val - test, total - test


def rows_by_place(first: int, rows: int, bounds: tuple[int, int]) -> dict[str, slice]:
    """The rows of each split among rows first, first + 1, ... of all."""
    edges = [0, *(min(max(bound - first, 0), rows) for bound in bounds), rows]
    return {name: slice(edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}


def rows_by_draw(drawn: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of each split, in their order."""
    return {name: np.flatnonzero(drawn == number) for number, name in enumerate(SPLITS)}


def _mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's next output for every state x (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
