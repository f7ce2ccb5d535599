"""Rows of a table's most frequent ids that are added to its TT part: a block of ids, and the columns kept for it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.nn.tt_module import TTModule
from comera_rec.ops.bags import HotBlock
from comera_rec.tt import TTShape, require_positive, slice_major


class HotRows(TTModule):
    """Rows [first, first + num_rows) of the matrix that is added to a TT table's cores' matrix: A diag(D) P.

    A [rows, k] has k numbers for each id of the block, P [k, N] makes columns of them. That is a TT matrix, too, of modes
    (rows, 1) x (1, N) and rank k, so ranks are scored, priced and truncated here as anywhere else: a block grows narrower.
    Blocks whose k falls with frequency are mixed dimension embeddings (Ginart et al., arXiv 1909.11810) beside the cores.

    A starts at zero and P as Gaussians of variance 1/k, so that hot rows change nothing until they are trained.

    Args:
        first: id of the block's first row.
        num_rows, num_cols: rows of the block, columns N of the table.
        width: k; no more is taken than N, or than there are rows.
        std: standard deviation of the table's entries, for columns that are added to a block which has none.
    """

    core_1: nn.Parameter
    rank_1: nn.Parameter

    def __init__(
        self,
        first: int,
        num_rows: int,
        num_cols: int,
        width: int,
        *,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = TTShape((num_rows, 1), (1, num_cols), width)
        super().__init__(num_rows, num_cols, shape, std, device=device, dtype=dtype)
        self.first = first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rows, projection = self.cores()
        if rows.is_meta:
            return
        with torch.no_grad():
            rows.zero_()
            projection.normal_(0.0, max(1, self.shape.ranks[0]) ** -0.5)
            self.rank_parameters()[0].fill_(1.0)

    def laid_out(self, k: int, core: Tensor) -> Tensor:
        return slice_major(core, k, 2)

    @property
    def dense_params(self) -> int:
        """0: the rows are those of a table, which has counted them."""
        return 0

    def block(self) -> HotBlock:
        """The parameters as a lookup takes them."""
        parameters: dict[str, Any] = self._parameters  # looking an attribute of a module up is slower
        return HotBlock(parameters["core_0"], parameters["core_1"], parameters["rank_1"])

    def extra_repr(self) -> str:
        return f"ids {self.first} to {self.first + self.num_rows - 1}, {super().extra_repr()}"


def require_blocks(blocks: Sequence[tuple[int, int]], num_embeddings: int) -> None:
    """Raise a ValueError unless blocks (rows, width) are positive and no more rows than the table has."""
    for rows, width in blocks:
        require_positive(rows_of_a_hot_block=rows, width_of_a_hot_block=width)
    if sum(rows for rows, _ in blocks) > num_embeddings:
        raise ValueError(f"hot_rows {tuple(blocks)} are more rows than the {num_embeddings} of the table: give fewer")
