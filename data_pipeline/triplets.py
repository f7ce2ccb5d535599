"""Triplets of .npy files from torchrec's scripts as logs: X_sparse.npy, with X_dense.npy and X_labels.npy beside it; local files.

    day_0_sparse.npy, or day_0_sparse_contig_freq.npy    integers [n, C], hex digits as numbers or contiguous ids; 0 = missing
    day_0_dense.npy                                      float32 [n, I], already transformed, stored unchanged
    day_0_labels.npy                                     integers [n, 1] or [n]

A part is a range of rows instead of bytes. Letters: n rows, I integer columns, C categorical columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.arrow import to_arrow
from data_pipeline.columns import LABEL
from data_pipeline.errors import UserError
from data_pipeline.schema import Column, LogSchema
from data_pipeline.sources import LogIdentity, Source, identify_log

MAGIC = b"\x93NUMPY"
_SPARSE = re.compile(r"_sparse[^/]*\.npy$")
_KINDS = {"sparse": "iu", "dense": "f", "labels": "iu"}


@dataclass(frozen=True, kw_only=True)
class Triplet:
    """The three files of one log, mapped into memory."""

    sparse: np.ndarray
    dense: np.ndarray
    labels: np.ndarray

    def rows_per_part(self, part_bytes: int) -> int:
        """Return how many rows fill a part."""
        row_bytes = sum(array.itemsize * array.shape[1] for array in (self.sparse, self.dense, self.labels))
        return max(1, part_bytes // row_bytes)

    def count_parts(self, part_bytes: int) -> int:
        return max(1, -(-len(self.sparse) // self.rows_per_part(part_bytes)))

    def schema(self) -> LogSchema:
        """Return the schema, with columns named like Criteo's."""
        integers = [Column(name=f"I{i + 1}", kind="integer") for i in range(self.dense.shape[1])]
        categories = [Column(name=f"C{i + 1}", kind="hex") for i in range(self.sparse.shape[1])]
        return LogSchema(columns=(Column(name=LABEL, kind="label"), *integers, *categories), transformed=True)

    def read(self, start: int, stop: int) -> pa.Table:
        """Read rows, with 0 as a missing category."""
        sparse = self.sparse[start:stop]
        # Scripts that store 32-bit numbers as int32 wrap around.
        sparse = np.where((sparse < 0) & (sparse >= -(1 << 31)), sparse.astype(np.int64) + (1 << 32), sparse)
        columns = [to_arrow(self.labels[start:stop, 0]), *map(to_arrow, self.dense[start:stop].T)]
        columns += [pc.if_else(pc.equal(column, 0), None, column) for column in map(to_arrow, sparse.T)]
        return pa.table(columns, names=[column.name for column in self.schema().columns])


def identify_triplet(log: Source) -> LogIdentity:
    """Return the combined identity of the three files, under the name of the sparse one."""
    files = [identify_log(file) for file in _files(log).values()]
    version = " ".join(identity.version for identity in files)
    return LogIdentity(name=files[0].name, bytes=sum(identity.bytes for identity in files), version=version)


def open_triplet(log: Source) -> Triplet:
    """Map a log's files.

    Raises:
        ValueError: a file is missing, has an unexpected type or shape, or differs from the others in its number of rows.
    """
    files = _files(log)
    arrays = {part: _open(file, _KINDS[part]) for part, file in files.items()}
    for part, array in arrays.items():
        if len(array) != len(arrays["sparse"]) or (part == "labels" and array.shape[1] != 1):
            raise UserError(
                f"{files[part]} has shape {list(array.shape)}, but {log} has {len(arrays['sparse'])} rows; "
                "give files of one data set"
            )
    return Triplet(**arrays)


def _files(log: Source) -> dict[str, Path]:
    if not isinstance(log, Path) or not _SPARSE.search(log.name):
        raise UserError(
            f"`input` {log}: give only the sparse .npy files, such as day_0_sparse.npy, on this machine; "
            "the others are found beside them"
        )
    return {"sparse": log} | {part: log.with_name(_SPARSE.sub(f"_{part}.npy", log.name)) for part in ("dense", "labels")}


def _open(log: Path, kinds: str) -> np.ndarray:
    identify_log(log)  # raises ValueError if it is missing
    try:
        array: np.ndarray = np.load(log, mmap_mode="r")
    except ValueError as error:
        raise UserError(f"{log} is not a whole .npy file ({error}); write it again") from error
    if not 1 <= array.ndim <= 2 or array.dtype.kind not in kinds or not array.flags.c_contiguous:
        order = "rows first" if array.flags.c_contiguous else "columns first"
        raise UserError(
            f"{log} holds {array.dtype} {list(array.shape)}, {order}; write integers, and float32 for dense, as torchrec does"
        )
    return array if array.ndim == 2 else array[:, np.newaxis]
