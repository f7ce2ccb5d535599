"""Tables that start from the vectors of a data set in order of similarity: `tables.start = "vectors"`."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from comera_rec.convert.start import start_from_vectors_, starting_rows
from comera_rec.nn import TTTable, named_tt_modules
from comera_rec.training.state import local_parts
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest, check_file


class StartingVectors:
    """The vectors of a data set's columns.

    Args:
        folder: of the data set.

    Raises:
        ValueError: if no column has vectors, or a file of them is missing.
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
        vectors = np.load(check_file(column.vectors, self._folder))[:, :-1]
        counts = pq.read_table(check_file(column.vocabulary, self._folder), columns=["count"])["count"].to_numpy()
        return (
            torch.from_numpy(np.concatenate([np.zeros_like(vectors[:1]), vectors])),
            torch.from_numpy(np.concatenate([[0], counts]).astype(np.float32)),
        )
