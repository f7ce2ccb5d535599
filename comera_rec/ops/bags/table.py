"""The parameters of a table, as a lookup takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class HotBlock(NamedTuple):
    """Rows of neighbouring ids that are added to those of the cores: A diag(D) P."""

    rows: Tensor
    """A, (1, rows, 1, k)."""
    projection: Tensor
    """P, (k, 1, N, 1)."""
    diagonal: Tensor
    """D, (k)."""


class Table(NamedTuple):
    """The parameters of a table."""

    cores: Sequence[Tensor]
    """(r_{k-1}, m_k, n_k, r_k)."""
    diagonals: Sequence[Tensor] = ()
    """Between neighbours D_k, (r_k); without any they are ones. Hot blocks have theirs in any case."""
    hot: Sequence[HotBlock] = ()
    """Blocks one after the other, from the table's first row on."""
    first: int = 0
    """Which of the table's rows id 0 is, where ids are those of a shard."""
