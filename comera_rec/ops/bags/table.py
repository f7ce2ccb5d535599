"""The parameters of a table in the form that a lookup takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class HotBlock(NamedTuple):
    """A block of hot rows, A diag(D) P, which is added to the rows of the cores."""

    rows: Tensor
    """A, (1, rows, 1, k)."""
    projection: Tensor
    """P, (k, 1, N, 1)."""
    diagonal: Tensor
    """D, (k) or (k, 1)."""


class Table(NamedTuple):
    """The parameters of a TT table."""

    cores: Sequence[Tensor]
    """Cores (r_{k-1}, m_k, n_k, r_k)."""
    diagonals: Sequence[Tensor] = ()
    """Rank parameters D_k, (r_k) or (r_k, 1), between neighboring cores; empty if all are ones. Hot blocks always have theirs."""
    hot: Sequence[HotBlock] = ()
    """Consecutive blocks of hot rows, from the table's first row on."""
    first: int = 0
    """Row of the table that id 0 refers to; above 0 in shards only."""
