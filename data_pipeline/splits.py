"""Assignment of rows to splits by position in the logs, by log, at random or by time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from data_pipeline.errors import UserError
from data_pipeline.manifest import SPLITS
from data_pipeline.schema import LogSchema

SplitKind = Literal["chronological", "day", "random", "time"]
Rows = slice | np.ndarray  # of indices, ascending


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Rule that assigns rows to splits, by the kind `split`; if that is the name of a split, it takes all rows.

    chronological: the last `test_fraction` of the rows is the test split, the `val_fraction` before it validation; both are rounded
        down.
    day: all logs but the last are for training; the first half of the last log (rounded up) is for validation, the rest is the test
        split, as is the convention for Criteo's terabyte.
    random: each row is drawn independently by a hash of the seed, its log and its position in the log's text. So fractions hold on
        average, and workers and part sizes don't matter. The default fractions are 8 : 1 : 1, as in BARS.
    time: rows from the time `test_from` on are the test split, those from `val_from` on before it are for validation.
    """

    split: SplitKind | Literal["train", "val", "test"] = "chronological"
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0
    val_from: float | None = None
    test_from: float | None = None

    @property
    def by_row(self) -> bool:
        """Whether a row's split is known without counting the rows before it."""
        return self.split in ("random", "time")

    def schema_used(self, schema: LogSchema) -> LogSchema:
        """Return the schema with a column of times ignored, unless rows are split by it.

        Raises:
            ValueError: rows are split by time, and there is no such column.
        """
        if self.split != "time":
            return replace(schema, columns=tuple(replace(c, kind="ignore") if c.kind == "time" else c for c in schema.columns))
        if not schema.of_kind("time"):
            raise UserError("`split` time needs a column of kind time; name one in `schema`")
        return schema

    def drawn(self, log: int, starts: np.ndarray) -> np.ndarray:
        """Draw random splits as indices into SPLITS [n], from the positions of rows in their log, int64 [n]."""
        key = mix64(np.array([self.seed], np.uint64) ^ mix64(np.array([log], np.uint64)))
        uniform = (mix64(starts.astype(np.uint64) ^ key) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return np.searchsorted([1 - self.val_fraction - self.test_fraction, 1 - self.test_fraction], uniform, side="right")

    def bounds(self, rows_of_logs: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of the first validation and test rows, if splits go by position."""
        total = sum(rows_of_logs)
        if self.split in SPLITS:
            return total * (self.split == "train"), total * (self.split != "test")
        if self.split == "day":
            return total - rows_of_logs[-1], total - rows_of_logs[-1] // 2
        # Rounded first, because 0.29 * 100 = 28.999999999999996 would lose a row.
        val, test = (math.floor(round(total * fraction, 6)) for fraction in (self.val_fraction, self.test_fraction))
        return total - val - test, total - test


def rows_by_position(first: int, rows: int, bounds: tuple[int, int]) -> dict[str, slice]:
    """Return each split's rows among `rows` rows, of which the first is number `first` of all."""
    edges = [0, *(min(max(bound - first, 0), rows) for bound in bounds), rows]
    return {name: slice(edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}


def in_pieces(rows: Rows, size: int) -> Iterator[Rows]:
    """Divide rows, whose slice has both ends, into consecutive pieces of at most `size`."""
    if isinstance(rows, slice):
        yield from (slice(at, min(at + size, rows.stop)) for at in range(rows.start, rows.stop, size))
    else:
        yield from (rows[at : at + size] for at in range(0, len(rows), size))


def mix64(x: np.ndarray) -> np.ndarray:
    """Return splitmix64's next output for every state x, uint64 of any shape; a bijection (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
