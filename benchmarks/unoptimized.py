"""The tensor-train table as first written down: every id gathers its slice of every core, and bmm multiplies the chain.

What CoMERA (section 4.1, arXiv 2405.14377) and others compare with as the unoptimized TTM embedding. No dedup on any level: time
and memory follow lookups times slices.

Shapes: L ids, B bags, N embedding_dim; m, n row and column mode of a core; r, s its left and right rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class UnoptimizedTTM(nn.Module):
    """Sum-pooled bags of one length over a tensor-train table.

    Args:
        cores: (r, m, n, s) each; copied.
        bag: ids in every bag.
    """

    def __init__(self, cores: Sequence[Tensor], bag: int) -> None:
        super().__init__()
        for k, core in enumerate(cores):
            self.register_parameter(f"core_{k}", nn.Parameter(core.detach().clone()))
        self._row_shape = [core.shape[1] for core in cores]
        self._bag = bag

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """[L] ids -> [B, N]; the bags being of one length, the offsets are not read."""
        rows = None
        for k, radix in enumerate(self._row_shape):
            core_rmns = self.get_parameter(f"core_{k}")
            digit_L = ids // math.prod(self._row_shape[k + 1 :]) % radix
            slices_Lrns = core_rmns.transpose(0, 1).index_select(0, digit_L)
            if rows is None:
                rows = slices_Lrns.flatten(1, 2)  # [L, n, s]; r is 1
            else:
                count, rank, width, right = slices_Lrns.shape
                rows = rows.bmm(slices_Lrns.reshape(count, rank, width * right)).reshape(count, -1, right)
        assert rows is not None
        return rows.reshape(-1, self._bag, rows.shape[1]).sum(1)
