"""Encoding of parsed columns, and writing of encoded rows as Parquet shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.arrow import to_arrow
from data_pipeline.hashing import IdSource, encode_keys
from data_pipeline.manifest import IntegerColumn
from data_pipeline.parse import Parsed, list_elements
from data_pipeline.schema import LogSchema
from data_pipeline.splits import Rows, in_pieces

# Small enough for loaders to shuffle row groups, large enough that the overhead of reading one is small.
ROW_GROUP_ROWS = 1 << 15
# 16 MiB of encoded rows; Parquet's writer needs several times as much. Groups of long lists or a thousand columns have fewer rows.
_ROW_GROUP_CELLS = 1 << 22
# Dictionaries shrink columns of few values; for many values, Parquet builds and discards them, in half of the writing time.
_DICTIONARY_IDS = 1 << 14
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes parsed columns for a shard: int8 labels, float32 weights (if any) and numbers, then int32 ids or lists of ids.

    Args:
        id_sources: the id source of each categorical column.
        num_embeddings: of each categorical column.
    """

    schema: LogSchema
    integers: tuple[IntegerColumn, ...]
    id_sources: tuple[IdSource, ...]
    num_embeddings: tuple[int, ...]

    @property
    def columns(self) -> pa.Schema:
        """Arrow schema of a shard."""
        labels = [(name, pa.int8()) for name in self.schema.labels]
        weight = [(self.schema.weight, pa.float32())] if self.schema.weight else []
        integers = [(name, pa.float32()) for name in self.schema.integers]
        singles = [(name, pa.int32()) for name in self.schema.singles]
        return pa.schema(labels + weight + integers + singles + [(name, pa.list_(pa.int32())) for name in self.schema.lists])

    def encode(self, parsed: Parsed, rows: Rows) -> tuple[pa.Table, np.ndarray]:
        """Encode rows, in order; also return how many ids of each categorical column are 0."""
        arrays = [to_arrow(label[rows]) for label in parsed.labels]
        arrays += [to_arrow(parsed.weights[rows])] if parsed.weights is not None else []
        arrays += [to_arrow(column) for column in self.numbers(parsed, rows)]
        ids, zeros = self.singles(parsed, rows)
        arrays += [to_arrow(column) for column in ids]
        for number in range(len(parsed.list_ends)):
            elements, lengths, at_zero = self.list(parsed, number, rows)
            zeros = np.append(zeros, at_zero)
            ends = np.concatenate([[0], np.cumsum(lengths)], dtype=np.int32)
            arrays.append(pa.ListArray.from_arrays(to_arrow(ends), to_arrow(elements)))
        return pa.Table.from_arrays(arrays, schema=self.columns), zeros

    def numbers(self, parsed: Parsed, rows: Rows) -> np.ndarray:
        """Transform the numeric columns of rows: float32 [I, n], 0.0 where a value is missing."""
        values, missing = _select(parsed.integers, rows), _select(parsed.integer_missing, rows)
        encoded = np.empty(values.shape, np.float32)
        for number, column in enumerate(self.integers):
            encoded[number] = _encode_numbers(values[number], missing[number], column)
        return encoded

    def singles(self, parsed: Parsed, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the single-valued categorical columns, int32 [C, n], and how many in each are 0."""
        keys = _select(parsed.keys, rows)
        return encode_keys(self.id_sources[: len(keys)], keys, _select(parsed.key_missing, rows))

    def list(self, parsed: Parsed, number: int, rows: Rows) -> tuple[np.ndarray, np.ndarray, int]:
        """Return a list column's int32 ids, concatenated, the lengths of its lists, and how many ids are 0."""
        keys, lengths = list_elements(parsed, number, rows)
        id_source = self.id_sources[len(parsed.keys) + number]
        ids, zeros = encode_keys((id_source,), keys[np.newaxis], np.zeros((1, len(keys)), np.bool_))
        return ids[0], lengths, int(zeros[0])

    def write(self, path: Path, parsed: Parsed, rows: Rows) -> np.ndarray:
        """Write rows as a shard in row groups of about equal size; return how many ids of each categorical column are 0.

        There are no statistics of row groups, because ids are read, not searched.
        """
        count, zeros = len(parsed.starts[rows]), np.zeros(len(self.id_sources), np.int64)
        groups = -(-count // min(ROW_GROUP_ROWS, parsed.rows_in(_ROW_GROUP_CELLS)))
        small = [name for name, size in zip(self.schema.categories, self.num_embeddings, strict=True) if size <= _DICTIONARY_IDS]
        small = [f"{name}.list.element" if name in self.schema.lists else name for name in small]
        options: dict[str, Any] = {"use_dictionary": [*self.schema.integers, *small], "write_statistics": False}
        with pq.ParquetWriter(path, self.columns, compression="lz4", **options) as writer:
            for group in in_pieces(rows, -(-count // groups)):
                table, zeros_of_group = self.encode(parsed, group)
                writer.write_table(table)
                zeros += zeros_of_group
        return zeros


def _select(columns: np.ndarray, rows: Rows) -> np.ndarray:
    """Select rows of columns [columns, n]; each selected column is contiguous."""
    return columns[:, rows] if isinstance(rows, slice) else columns.take(rows, axis=1)


def _encode_numbers(values: np.ndarray, missing: np.ndarray, column: IntegerColumn) -> np.ndarray:
    """Compute x, (x - mean) / scale or log(max(x, low) - low + 2), where low is 2 - offset: float32, 0.0 where x is missing."""
    if column.transform == "none":
        return values.astype(np.float32)
    if column.mean is not None and column.scale is not None:
        standardized = np.where(missing, 0, (values - column.mean) / column.scale)
        return standardized.clip(-_LARGEST, _LARGEST).astype(np.float32)
    low = 2 - column.offset
    return np.where(missing, 0, np.log(np.maximum(values.astype(np.float64), low) - low + 2)).astype(np.float32)
