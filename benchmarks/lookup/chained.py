"""TT tables looked up row by row: every row gathers its slice of every core, and bmm multiplies the chain.

This is the unoptimized TTM embedding that CoMERA (section 4.1, arXiv 2405.14377) and others compare with: rows share no slices or
products. Time and memory are proportional to rows times slices; the rows are all lookups, or the unique ones with row dedup.

Shapes: T tables, L rows to look up, B bags of P ids, N embedding_dim; m, n row and column mode of a core; r, s its two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.lookup.batch import Batch


def chain_rows(cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Look up rows [L, N] of a TT table for ids [L], slice by slice; cores are (m, r, n, s), one slice per value of the digit."""
    radices = [len(core) for core in cores]
    slices = [core_mrns.index_select(0, ids // math.prod(radices[k + 1 :]) % radices[k]) for k, core_mrns in enumerate(cores)]
    rows_Lns = slices[0].flatten(1, 2)  # r is 1
    for slice_Lrns in slices[1:]:
        rows_Lns = rows_Lns.bmm(slice_Lrns.flatten(2)).view(len(ids), -1, slice_Lrns.shape[3])
    return rows_Lns.flatten(1)


def rows_of(bag: cr.TTEmbeddingBag, ids: Tensor) -> Tensor:
    """Look up rows [L, N] of a table by definition, G_1 diag(D_1) G_2 ...; differentiable in its parameters."""
    first, *others = (core.transpose(0, 1) for core in bag.cores())
    scaled = [rank[:, :, None] * core for rank, core in zip(bag.rank_parameters(), others, strict=True)]
    return chain_rows([first, *scaled], ids)[:, : bag.embedding_dim]


class ChainedTables(nn.Module):
    """Sum-pooled bags of one length over TT tables, one chain per table.

    Args:
        tables: name -> cores (m, r, n, s); copied.
        bag: P.
        dedup: chain only the unique ids of each table.
    """

    def __init__(self, tables: dict[str, list[Tensor]], bag: int, *, dedup: bool) -> None:
        super().__init__()
        self._bag = bag
        self._dedup = dedup
        self.tables = nn.ModuleDict(
            {
                name: nn.ParameterDict({f"core_{k}": core.detach().clone() for k, core in enumerate(cores)})
                for name, cores in tables.items()
            }
        )

    def forward(self, batch: Batch) -> Tensor:
        """[B, T * N]."""
        pooled = [self._pool(list(cores.parameters()), ids) for cores, ids in zip(self.tables.values(), batch.ids, strict=True)]
        return torch.cat(pooled, dim=1)

    def _pool(self, cores: Sequence[Tensor], ids: Tensor) -> Tensor:
        if self._dedup:
            unique, inverse = ids.unique(return_inverse=True)
            rows_LN = chain_rows(cores, unique).index_select(0, inverse)
        else:
            rows_LN = chain_rows(cores, ids)
        return rows_LN if self._bag == 1 else rows_LN.unflatten(0, (-1, self._bag)).sum(1)


def chain_bytes(shape: cr.TTShape, rows: int) -> int:
    """Approximate peak bytes of a training step over one table: the slices and their gradients, in float32."""
    return 2 * 4 * rows * sum(left * col * right for left, _, col, right in shape.core_shapes)
