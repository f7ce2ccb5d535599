"""Orders for the rows of trained tables: rows that are similar share slices, and TT-SVD then loses less.

M rows, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_pipeline.similarity import similarity_order

_COORDINATES = 16


def similar_rows(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the row that each id gets if similar rows of a trained table become neighbors: int64 [M], a permutation.

    Rows are compared by their leading principal coordinates, in bands of importance as `comera_rec.similarity_order` has them.

    Args:
        weight: [M, N], the rows of ids.
        importance: [M], see `fit_tables_`; default the rows' squared lengths, because rows that are often read have moved most.
    """
    rows = weight.detach().float()
    importance = rows.square().sum(1) if importance is None else importance.to(rows)
    frequent = importance.argsort(descending=True, stable=True)
    axes = torch.linalg.eigh(rows.mT @ (importance[:, None] * rows))[1].flip(1)[:, :_COORDINATES]
    coordinates = (rows @ axes)[frequent]
    vectors = torch.cat([coordinates, coordinates.new_zeros(len(rows), 1)], dim=1)
    order = torch.from_numpy(similarity_order(vectors.numpy(force=True)))
    return torch.empty_like(order).index_put_((frequent.cpu()[order],), torch.arange(len(order)))
