"""Values for tables to start from: rows that already say which ids occur with the same values.

Vectors of co-occurrence (`data_pipeline.similarity`) put ids that occur with the same values close together, which random values
would have to learn from labels. A TT table starts from their TT-SVD, weighted by frequency. That helps where the fit is good, as it
is for ids in order of similarity; a poor fit is worse than random values, so the table then keeps those that it has.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from comera_rec.convert.budget import fit_tables_
from comera_rec.nn import TTTable

_STD = 0.1  # of the rows' entries
_MOST_ERROR = 0.55  # squared error of a fit, relative to the rows' squares


def starting_rows(vectors: Tensor, num_embeddings: int, embedding_dim: int) -> Tensor:
    """Return rows [M, N] to start from: leading coordinates of vectors [m, K] for the first m <= M ids, scaled; zeros elsewhere."""
    rows = torch.zeros(num_embeddings, embedding_dim)
    known = vectors[:num_embeddings, :embedding_dim].float()
    rows[: len(known), : known.shape[1]] = known * (_STD / known.std().clamp_min(1e-12))
    return rows


@torch.no_grad()
def start_from_vectors_(table: TTTable, vectors: Tensor, importance: Tensor | None = None) -> bool:
    """Let a TT table, with or without hot rows, start from vectors of its ids, unless the fit is poor.

    Args:
        table: keeps its number of parameters; its ranks may change where it has several bonds, or hot rows.
        vectors: [m, K] for the first m <= M ids, the most informative coordinates first; other ids start at zero.
        importance: [M], weights of the rows' squared errors, such as how often an id occurs. Default: equal.

    Returns:
        Whether the table starts from them.
    """
    rows = starting_rows(vectors, table.num_embeddings, table.embedding_dim)
    fitted = copy.deepcopy(table)
    budget = sum(module.shape.num_params for module in (table, *table.hot_blocks()))
    fit_tables_([fitted], [rows], budget, [importance])
    weights = torch.ones(len(rows)) if importance is None else importance.float()
    squares, errors = (weights @ x.square().sum(dim=1) for x in (rows, rows - fitted.dense_matrix()))
    if not bool(errors <= _MOST_ERROR * squares):  # also if it is not a number
        return False
    table.load_state_dict(fitted.state_dict())
    return True
