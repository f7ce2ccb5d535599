"""Tables that start from the vectors of a data set in order of similarity: `tables.start = "vectors"`.

Vectors of co-occurrence (`data_pipeline.similarity`) put ids that occur with the same values close together, which random values
would have to learn from labels. A TT table starts from their TT-SVD, weighted by frequency. That helps where the fit is good, as it
is for ids in order of similarity; a poor fit is worse than random values, so the table then keeps those that it has.
"""

import copy
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from comera_rec.convert import fit_tables_
from comera_rec.nn import TTTable, named_tt_modules
from comera_rec.training.state import local_parts
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest, check_file

_STD = 0.1  # of the rows' entries
_MOST_ERROR = 0.55  # squared error of a fit, relative to the rows' squares


class StartingVectors:
    """The vectors of a data set's columns.

    Args:
        folder: of the data set.

    Raises:
        ValueError: if no column has vectors, or a file of them is missing or damaged.
    """

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._folder = folder
        self._columns = {column.name: column for column in manifest.categorical_columns if column.vectors}
        if not self._columns:
            raise UserError(
                f"tables.start is 'vectors', but {folder} has none: preprocess with --order similarity, or set tables.start=random"
            )

    def set_tt_tables_(self, model: nn.Module) -> None:
        """Set the TT tables of a whole model, where their ranks can represent the vectors."""
        for name, module in named_tt_modules(model):
            column = unquote(name.rpartition(".")[2])
            if isinstance(module, TTTable) and column in self._columns:
                vectors, counts = self._read(column)
                start_from_vectors_(module, vectors, torch.cat([counts, torch.zeros(module.num_embeddings - len(counts))]))

    @torch.no_grad()
    def set_dense_tables_(self, model: nn.Module) -> None:
        """Set the dense tables of a model, or those of their rows that are kept by this process."""
        for name, weight in model.state_dict().items():
            found = re.search(r"embedding_bags\.([^.]+)\.weight$", name)
            if found and unquote(found[1]) in self._columns:
                rows = starting_rows(self._read(unquote(found[1]))[0], *weight.shape)
                for part, first in local_parts(weight):
                    part.copy_(rows[first : first + len(part)])

    def _read(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a column's vectors [ids, K] and counts [ids], of ids from 0 on; 0 is the missing value."""
        column = self._columns[name]
        assert column.vectors
        assert column.vocabulary
        vectors = np.load(check_file(column.vectors, self._folder, contents=True))[:, :-1]
        counts = pq.read_table(check_file(column.vocabulary, self._folder, contents=True), columns=["count"])["count"].to_numpy()
        return (
            torch.from_numpy(np.concatenate([np.zeros_like(vectors[:1]), vectors])),
            torch.from_numpy(np.concatenate([[0], counts]).astype(np.float32)),
        )


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
