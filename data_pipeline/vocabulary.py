"""Category values to ids by training frequency: 0 = missing, rare or unseen; 1, 2, ... from the most frequent value on.

Neighbouring ids are then alike in frequency, so hot rows share the leading digits of a tensor-train table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


class Vocabulary:
    """The values of one column that have an id, in id order from 1, with their counts in the training split.

    Args:
        column: uint32 values of the training split, null = missing.
        min_count: values seen fewer times get no id.
    """

    def __init__(self, column: pa.ChunkedArray, *, min_count: int) -> None:
        counted = pc.value_counts(column)
        counted = counted.filter(counted.field("values").is_valid())
        values, counts = counted.field("values").to_numpy(), counted.field("counts").to_numpy()
        frequent = counts >= min_count
        values, counts = values[frequent], counts[frequent]
        order = np.lexsort((values, -counts))
        self.values: np.ndarray = values[order]
        self.counts: np.ndarray = counts[order]
        self._index = pd.Index(self.values)
        # The index builds its hash table at the first lookup; lookups from several threads must find it built.
        self._index.get_indexer(self.values[:1])

    @property
    def num_embeddings(self) -> int:
        """Rows of an embedding table for the ids: the largest id + 1."""
        return len(self.values) + 1

    def encode(self, column: pa.ChunkedArray) -> np.ndarray:
        """int32 ids of uint32 values, null = missing."""
        ids: np.ndarray = (self._index.get_indexer(column.fill_null(0).to_numpy()) + 1).astype(np.int32)
        ids[column.is_null().to_numpy()] = 0
        return ids

    def write(self, path: Path) -> None:
        """Write columns value (uint32) and count (int64) in id order from 1, for encoding when serving."""
        pq.write_table(pa.table({"value": pa.array(self.values, pa.uint32()), "count": pa.array(self.counts, pa.int64())}), path)
