"""A table in the form used for serving: all products that don't depend on the request are formed in advance.

M rows, N columns, d cores of m_k slices, r_k the ranks between them, h rows, w the width of a slab.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A block of hot rows, rows [h, w] times columns [w, N], which is added to the rows of the cores."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """The table of one feature.

    Attributes:
        rows, columns: M and N.
        mean: whether bags are averaged rather than summed.
        formed: [h, N] rows of the ids below h. A dense table has all of its rows here, and no cores.
        cores: core k is [m_k, r_{k-1}, r_k, n_k], with the diagonals multiplied in.
        slabs: consecutive hot rows from row 0 on.
        row_order: [M] int32, the row of each id; None if ids are rows.
    """

    rows: int
    columns: int
    mean: bool
    formed: Tensor
    cores: tuple[Tensor, ...] = ()
    slabs: tuple[Slab, ...] = ()
    row_order: Tensor | None = None

    @property
    def row_modes(self) -> tuple[int, ...]:
        """(m_1..m_d)."""
        return tuple(core.shape[0] for core in self.cores)

    @property
    def col_modes(self) -> tuple[int, ...]:
        """(n_1..n_d)."""
        return tuple(core.shape[3] for core in self.cores)
