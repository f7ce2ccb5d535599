"""The parameters of tables in the form that lookups take."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class TableGroup:
    """Tables that share lookups, and the layouts made of them so far: those that refer to the parameters serve all lookups.

    Args:
        tables: `Table`s, or pairs of cores and diagonals.
    """

    def __init__(self, tables: Sequence[Table | tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self.tables = [Table(*table) for table in tables]
        self._layouts: dict[tuple[Any, bool], Any] = {}

    def layout(self, make: Callable[[Sequence[Table], bool], Any], may_update: bool) -> Any:
        """Return make(tables, may_update), made by an earlier lookup or now; what copies parameters (`has_copies`) isn't kept."""
        layout = self._layouts.get((make, may_update))
        if layout is None:
            layout = make(self.tables, may_update)
            if not layout.has_copies:
                self._layouts[make, may_update] = layout
        return layout
