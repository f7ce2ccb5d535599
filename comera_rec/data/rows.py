"""Rows on their way from Parquet to a batch, column by column.

n rows, L labels, W columns of weights (0 or 1), I integer columns, S categorical columns with one id per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Lists(NamedTuple):
    """A column of lists, as Arrow holds it: row i is values[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray  # [n + 1], starting at any number
    values: np.ndarray  # [...] int32

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, values: np.ndarray) -> Lists:
        return cls(np.append(0, np.cumsum(lengths)), values)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def flat(self) -> np.ndarray:
        return self.values[self.offsets[0] : self.offsets[-1]]

    def slice(self, start: int, stop: int) -> Lists:
        return Lists(self.offsets[start : stop + 1], self.values)

    def take(self, order: np.ndarray) -> Lists:
        lengths, begins = self.lengths[order], self.offsets[:-1][order]
        before = np.cumsum(lengths) - lengths
        return Lists.from_lengths(lengths, self.values[np.repeat(begins - before, lengths) + np.arange(lengths.sum())])


class Rows(NamedTuple):
    """Rows column by column, as in Parquet and in a KeyedJaggedTensor. S columns have one id per row."""

    dense: np.ndarray  # [I, n] float32
    ids: np.ndarray  # [S, n] int32
    labels: np.ndarray  # [L, n] float32
    weights: np.ndarray  # [W, n] float32
    lists: tuple[Lists, ...]

    @property
    def size(self) -> int:
        return self.labels.shape[1]

    def slice(self, start: int, stop: int) -> Rows:
        stop = min(stop, self.size)
        dense, ids, labels, weights = (part[:, start:stop] for part in self[:4])
        return Rows(dense, ids, labels, weights, tuple(column.slice(start, stop) for column in self.lists))

    def take(self, order: np.ndarray) -> Rows:
        dense, ids, labels, weights = (part.take(order, axis=1) for part in self[:4])
        return Rows(dense, ids, labels, weights, tuple(column.take(order) for column in self.lists))


def concatenate(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    dense, ids, labels, weights = (np.concatenate(cells, axis=1) for cells in zip(*(part[:4] for part in parts), strict=True))
    columns = zip(*(part.lists for part in parts), strict=True)
    lists = (
        Lists.from_lengths(np.concatenate([part.lengths for part in column]), np.concatenate([part.flat for part in column]))
        for column in columns
    )
    return Rows(dense, ids, labels, weights, tuple(lists))
