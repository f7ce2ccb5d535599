"""Triplets of .npy files from torchrec's scripts as logs: X_sparse.npy, with X_dense.npy and X_labels.npy beside it.

    day_0_sparse.npy, or day_0_sparse_contig_freq.npy    integers [n, C], hex digits as numbers or contiguous ids; 0 = missing
    day_0_dense.npy                                      float32 [n, I], already transformed, stored unchanged
    day_0_labels.npy                                     integers [n, 1] or [n]

A part is a range of rows instead of bytes. Letters: n rows, I integer columns, C categorical columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.arrow import to_arrow
from data_pipeline.columns import LABEL
from data_pipeline.schema import Column, LogSchema
from data_pipeline.sources import LogIdentity, Source, identify_log, name_of, open_log, sibling

MAGIC = b"\x93NUMPY"
_SPARSE = re.compile(r"_sparse[^/]*\.npy$")
_KINDS = {"sparse": "iu", "dense": "f", "labels": "iu"}


@dataclass(frozen=True, kw_only=True)
class _File:
    log: Source
    rows: int
    columns: int
    dtype: np.dtype
    offset: int

    def read(self, start: int, stop: int) -> np.ndarray:
        row_bytes = self.columns * self.dtype.itemsize
        with open_log(self.log) as file:
            file.seek(self.offset + start * row_bytes)
            data = file.read((stop - start) * row_bytes)
        if len(data) != (stop - start) * row_bytes:
            raise ValueError(f"{self.log} ends before row {stop} of the {self.rows} in its header; write it again")
        return np.frombuffer(data, self.dtype).reshape(stop - start, self.columns)


@dataclass(frozen=True, kw_only=True)
class Triplet:
    """The three files of one log."""

    sparse: _File
    dense: _File
    labels: _File

    @property
    def rows(self) -> int:
        return self.sparse.rows

    def rows_per_part(self, part_bytes: int) -> int:
        """Return how many rows fill a part."""
        files = (self.sparse, self.dense, self.labels)
        return max(1, part_bytes // sum(file.columns * file.dtype.itemsize for file in files))

    def count_parts(self, part_bytes: int) -> int:
        return max(1, -(-self.rows // self.rows_per_part(part_bytes)))

    def schema(self) -> LogSchema:
        """Return the schema, with columns named like Criteo's."""
        integers = [Column(name=f"I{i + 1}", kind="integer") for i in range(self.dense.columns)]
        categories = [Column(name=f"C{i + 1}", kind="hex") for i in range(self.sparse.columns)]
        return LogSchema(columns=(Column(name=LABEL, kind="label"), *integers, *categories), transformed=True)

    def read(self, start: int, stop: int) -> pa.Table:
        """Read rows, with 0 as a missing category."""
        labels, dense, sparse = (file.read(start, stop) for file in (self.labels, self.dense, self.sparse))
        # Scripts that store 32-bit numbers as int32 wrap around.
        sparse = np.where((sparse < 0) & (sparse >= -(1 << 31)), sparse.astype(np.int64) + (1 << 32), sparse)
        columns = [to_arrow(labels[:, 0]), *map(to_arrow, dense.T)]
        columns += [pc.if_else(pc.equal(column, 0), None, column) for column in map(to_arrow, sparse.T)]
        return pa.table(columns, names=[column.name for column in self.schema().columns])


def identify_triplet(log: Source) -> LogIdentity:
    """Return the combined identity of the three files, under the name of the sparse one."""
    files = [identify_log(file) for file in _files(log).values()]
    version = " ".join(identity.version for identity in files)
    return LogIdentity(name=files[0].name, bytes=sum(identity.bytes for identity in files), version=version)


def open_triplet(log: Source) -> Triplet:
    """Read the headers of a log's files.

    Raises:
        ValueError: a file is missing, has an unexpected type or shape, or differs from the others in its number of rows.
    """
    files = {part: _open(file, _KINDS[part]) for part, file in _files(log).items()}
    for part, file in files.items():
        if file.rows != files["sparse"].rows or (part == "labels" and file.columns != 1):
            raise ValueError(
                f"{file.log} has shape [{file.rows}, {file.columns}], but {log} has {files['sparse'].rows} rows; "
                "give files of one data set"
            )
    return Triplet(**files)


def _files(log: Source) -> dict[str, Source]:
    name = name_of(log)
    if not _SPARSE.search(name):
        raise ValueError(
            f"`input` {log}: give only the sparse .npy files, such as day_0_sparse.npy; the others are found beside them"
        )
    return {"sparse": log} | {part: sibling(log, _SPARSE.sub(f"_{part}.npy", name)) for part in ("dense", "labels")}


def _open(log: Source, kinds: str) -> _File:
    identify_log(log)  # raises ValueError if it is missing
    with open_log(log, streamed=True) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            offset = file.tell()
        except ValueError as error:
            raise ValueError(f"{log} is not a .npy file ({error}); write it again") from error
    if not 1 <= len(shape) <= 2 or dtype.kind not in kinds or fortran:
        order = "columns first" if fortran else "rows first"
        raise ValueError(f"{log} holds {dtype} {list(shape)}, {order}; write integers, and float32 for dense, as torchrec does")
    return _File(log=log, rows=shape[0], columns=shape[1] if len(shape) == 2 else 1, dtype=dtype, offset=offset)
