"""Hot rows: low-rank rows of a table's most frequent ids, added to those of its cores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.nn.tt_module import TTModule
from comera_rec.ops.bags import HotBlock
from comera_rec.tt import TTShape, require_positive, slice_major
from data_pipeline.errors import UserError


class HotRows(TTModule):
    """A block of hot rows, A diag(D) P: it is added to rows [first, first + num_rows) of the matrix of a TT table's cores.

    A [rows, k] has k numbers for each id of the block, and P [k, N] maps them to columns. This is a TT matrix of modes
    (rows, 1) x (1, N) and rank k, so its ranks are scored, priced and truncated like any others, which makes a block narrower.
    With several blocks these are mixed dimension embeddings (Ginart et al., arXiv 1909.11810) beside the cores.

    A starts at zero and P with variance 1/k, so hot rows change nothing until they are trained.

    Args:
        first: id of the block's first row.
        num_rows, num_cols: rows of the block, columns N of the table.
        width: k, reduced to N or the number of rows if it is larger.
        std: standard deviation of the entries when ranks are added to a block that has lost all of them.
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
        """Set A to zero and D to one, and draw P."""
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
        """0, because the table counts these rows already."""
        return 0

    def block(self) -> HotBlock:
        """Return the parameters in the form that a lookup takes."""
        parameters: dict[str, Any] = self._parameters  # faster than looking up attributes of a module
        return HotBlock(parameters["core_0"], parameters["core_1"], parameters["rank_1"])

    def extra_repr(self) -> str:
        return f"ids {self.first} to {self.first + self.num_rows - 1}, {super().extra_repr()}"


def require_blocks(blocks: Sequence[tuple[int, int]], num_embeddings: int) -> None:
    """Raise ValueError unless blocks (rows, width) are positive and together have at most the rows of the table."""
    for rows, width in blocks:
        require_positive(rows_of_a_hot_block=rows, width_of_a_hot_block=width)
    if sum(rows for rows, _ in blocks) > num_embeddings:
        raise UserError(f"hot_rows {tuple(blocks)} have more rows than the table's {num_embeddings}: give fewer")
