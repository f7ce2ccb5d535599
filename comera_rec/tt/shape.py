"""Sizes of a tensor-train matrix: how its rows and columns split into modes, and how many parameters that takes.

M rows, N columns; d cores; m_k, n_k the row and column mode of core k; r_k the rank of the bond between cores k and k+1;
r_0 = r_d = 1.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from comera_rec.tt.modes import factorize, require_order, require_positive
from data_pipeline.errors import UserError

Modes = tuple[tuple[int, ...], tuple[int, ...]]
"""Row modes and column modes."""


@dataclass(frozen=True)
class TTShape:
    """Modes and ranks of a tensor-train matrix (TTM).

    A matrix of M <= m_1...m_d rows and N <= n_1...n_d columns is stored as cores G_k of shape (r_{k-1}, m_k, n_k, r_k), with
    r_0 = r_d = 1, and rank parameters D_k of shape (r_k) between neighbors. A TT linear layer is the same object with n_k = 1
    at its input modes and m_k = 1 at its output modes. CoMERA, section 3.1 (arXiv 2405.14377).

    Args:
        row_shape: (m_1..m_d), most significant first.
        col_shape: (n_1..n_d).
        ranks: (r_1..r_{d-1}), or one integer, the largest rank: each bond then takes the smaller of it and what its modes allow.
            A rank of zero means that the bond was truncated away, which makes the whole matrix zero.

    Raises:
        ValueError: for sizes below 1, negative ranks, or lengths that do not match.

    Example:
        >>> shape = TTShape((100, 100), (4, 4), 8)
        >>> shape.num_rows, shape.num_cols, shape.num_params
        (10000, 16, 6408)
    """

    row_shape: tuple[int, ...]
    col_shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __init__(self, row_shape: Sequence[int], col_shape: Sequence[int], ranks: int | Sequence[int]) -> None:
        row_shape, col_shape = tuple(row_shape), tuple(col_shape)
        require_order(len(row_shape))
        if len(col_shape) != len(row_shape):
            raise UserError(
                f"col_shape {col_shape} has {len(col_shape)} modes but row_shape {row_shape} has {len(row_shape)}: match them"
            )
        for k, (m, n) in enumerate(zip(row_shape, col_shape, strict=True)):
            require_positive(**{f"row_shape[{k}]": m, f"col_shape[{k}]": n})
        if isinstance(ranks, int | float):
            require_positive(ranks=ranks)
            ranks = tuple(min(ranks, limit) for limit in max_ranks(row_shape, col_shape))
        ranks = tuple(ranks)
        if len(ranks) != len(row_shape) - 1:
            raise UserError(f"ranks {ranks} has {len(ranks)} entries: {len(row_shape)} modes need {len(row_shape) - 1}")
        if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in ranks):
            raise UserError(f"ranks {ranks} must be non-negative integers")
        if 0 in ranks:
            ranks = (0,) * len(ranks)
        object.__setattr__(self, "row_shape", row_shape)
        object.__setattr__(self, "col_shape", col_shape)
        object.__setattr__(self, "ranks", ranks)

    @property
    def order(self) -> int:
        """Number of cores d."""
        return len(self.row_shape)

    @property
    def num_rows(self) -> int:
        """Rows that the modes can address: m_1...m_d, at least the table's M."""
        return math.prod(self.row_shape)

    @property
    def num_cols(self) -> int:
        """Columns that the modes span: n_1...n_d, at least the table's N."""
        return math.prod(self.col_shape)

    @property
    def bonds(self) -> tuple[int, ...]:
        """(r_0, r_1, ..., r_d) with the outer ranks 1."""
        return (1, *self.ranks, 1)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(r_{k-1}, m_k, n_k, r_k) of every core."""
        bonds = self.bonds
        return tuple(zip(bonds[:-1], self.row_shape, self.col_shape, bonds[1:], strict=True))

    @property
    def num_input_modes(self) -> int:
        """How many modes of a linear layer are its input's.

        Raises:
            ValueError: if they don't come before those of the output.
        """
        inputs = next((k for k, n in enumerate(self.col_shape) if n > 1), self.order - 1)
        if not inputs or set(self.row_shape[inputs:]) != {1}:
            raise UserError(
                f"shape with row_shape {self.row_shape} and col_shape {self.col_shape} is not that of a TT linear layer: "
                "give input modes first (column modes 1), then output modes (row modes 1), as TTShape.for_linear does"
            )
        return inputs

    @property
    def num_params(self) -> int:
        """Numbers stored: sum_k r_{k-1} m_k n_k r_k in the cores and sum_k r_k rank parameters.

        Times the item size, this is the size on disk.
        """
        return sum(math.prod(core) for core in self.core_shapes) + sum(self.ranks)

    @property
    def compression(self) -> float:
        """Dense parameters of the addressable matrix over `num_params`; infinite once every rank is truncated away."""
        return self.num_rows * self.num_cols / self.num_params if self.num_params else math.inf

    def require_covers(self, num_rows: int, num_cols: int) -> None:
        """Raise ValueError unless a matrix of num_rows x num_cols fits into the modes."""
        if num_rows > self.num_rows or num_cols > self.num_cols:
            raise UserError(f"shape spans {self.num_rows} x {self.num_cols}, less than {num_rows} x {num_cols}: enlarge its modes")

    def covering(self, num_rows: int) -> "TTShape":
        """Return the shape with a first row mode that is large enough for a number of rows; ids keep their digits."""
        first, *others = self.row_shape
        return TTShape((max(first, -(-num_rows // math.prod(others))), *others), self.col_shape, self.ranks)

    def with_ranks(self, ranks: int | Sequence[int]) -> "TTShape":
        """Return the same modes at other ranks."""
        return TTShape(self.row_shape, self.col_shape, ranks)

    @classmethod
    def for_table(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        order: int | None = None,
        budget_params: int | None = None,
    ) -> "TTShape":
        """Choose modes, and ranks where only a budget is given, for an embedding table.

        Args:
            num_embeddings: rows M.
            embedding_dim: columns N.
            tt_ranks: one rank for all bonds, or one for each. Default 16 where no budget is given.
            order: number of cores, 2 to 4. Default: the lowest at which the budget buys rank 8, or else the one of the largest
                rank; without a budget, one more than `tt_ranks` has entries, or 2.
            budget_params: the most parameters the table may take.

        Raises:
            ValueError: for sizes below 1, for both ranks and a budget, or for a budget too small for rank 1.

        Example:
            >>> TTShape.for_table(1_000_000, 64, budget_params=640_000)
            TTShape(row_shape=(1000, 1000), col_shape=(8, 8), ranks=(39,))
        """
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        modes = {d: (factorize(num_embeddings, d), factorize(embedding_dim, d)) for d in (2, 3, 4)}
        if order is not None and order not in modes:
            raise UserError(f"order is {order!r}: embedding tables take 2, 3 or 4 cores")
        name = f"a {num_embeddings} x {embedding_dim} table"
        return _chosen(modes, tt_ranks, order, budget_params, default_order=2, name=name)

    @classmethod
    def for_linear(
        cls,
        in_features: int,
        out_features: int,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        order: int | None = None,
        budget_params: int | None = None,
    ) -> "TTShape":
        """Choose modes, and ranks where only a budget is given, for a linear layer: input modes first, then output modes.

        Args:
            in_features: rows of the transposed weight.
            out_features: columns of the transposed weight.
            tt_ranks: as in `for_table`.
            order: number of cores, even, 2 to 8: half of them hold input modes, half output modes. Default: as in `for_table`, but
                4 where it is 2.
            budget_params: the most parameters the layer may take, biases aside.

        Raises:
            ValueError: as `for_table`.
        """
        require_positive(in_features=in_features, out_features=out_features)
        modes: dict[int, Modes] = {}
        for half in (1, 2, 3, 4):
            ones = (1,) * half
            # Ascending output modes mirror the descending input modes: the smallest modes meet at the middle bond.
            modes[2 * half] = factorize(in_features, half) + ones, ones + factorize(out_features, half)[::-1]
        if order is not None and order not in modes:
            raise UserError(f"order is {order!r}: linear layers take 2, 4, 6 or 8 cores, half of them for the input")
        name = f"a {in_features} x {out_features} linear layer"
        return _chosen(modes, tt_ranks, order, budget_params, default_order=4, name=name)


def max_ranks(row_shape: Sequence[int], col_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the largest useful rank of each bond: the product of the sizes m_k n_k on its left or on its right, if smaller."""
    sizes = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))


def _chosen(
    modes: Mapping[int, Modes],
    tt_ranks: int | Sequence[int] | None,
    order: int | None,
    budget_params: int | None,
    *,
    default_order: int,
    name: str,
) -> TTShape:
    """Return the shape of the given order or size; `modes` by rising order."""
    if budget_params is not None:
        if tt_ranks is not None:
            raise UserError(f"tt_ranks {tt_ranks} and budget_params {budget_params} are both given: give one of them")
        require_positive(budget_params=budget_params)
        return _within_budget([modes[order]] if order else list(modes.values()), budget_params, name)
    tt_ranks = 16 if tt_ranks is None else tt_ranks
    if isinstance(tt_ranks, SupportsIndex | float):
        tt_ranks = tt_ranks if isinstance(tt_ranks, float) else operator.index(tt_ranks)
        require_positive(tt_ranks=tt_ranks)
        return TTShape(*modes[order or default_order], tt_ranks)
    for k, rank in enumerate(tt_ranks):
        require_positive(**{f"tt_ranks[{k}]": rank})
    order = order or len(tt_ranks) + 1
    if order not in modes:
        raise UserError(f"tt_ranks {tuple(tt_ranks)} would need {order} cores: give one rank per bond, or one integer for all")
    return TTShape(*modes[order], tt_ranks)


def _within_budget(modes: Sequence[Modes], budget_params: int, name: str) -> TTShape:
    """Return the first of modes, in rising order, whose largest rank that fits is 8 or more; or else those of the largest rank."""
    ranks = [_largest_rank(*each, budget_params) for each in modes]
    shapes = [TTShape(*each, rank) for each, rank in zip(modes, ranks, strict=True) if rank]
    if not shapes:
        least = min(TTShape(*each, 1).num_params for each in modes)
        raise UserError(f"budget_params is {budget_params}: {name} takes at least {least} parameters, at rank 1")
    enough = (s for s in shapes if max(s.ranks) >= min(8, max(max_ranks(s.row_shape, s.col_shape))))
    return next(enough, max(shapes, key=lambda shape: max(shape.ranks)))


def _largest_rank(row_shape: tuple[int, ...], col_shape: tuple[int, ...], budget_params: int) -> int:
    """Return the largest rank within the budget, shared by all bonds whose modes allow it; 0 if even rank 1 doesn't fit."""
    sizes = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    limits = max_ranks(row_shape, col_shape)

    def num_params(rank: int) -> int:
        ranks = [min(rank, limit) for limit in limits]
        return sum(ranks) + sum(left * size * right for left, size, right in zip([1, *ranks], sizes, [*ranks, 1], strict=True))

    return bisect_right(range(1, min(max(limits), budget_params) + 1), budget_params, key=num_params)
