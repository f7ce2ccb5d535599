"""Pass 2, a part: raw columns to encoded Parquet shards, one for each split that has rows in the part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import replacing
from data_pipeline.columns import LABEL
from data_pipeline.counts import list_elements
from data_pipeline.manifest import IntegerColumn, Shard, describe_file
from data_pipeline.parse import Parsed
from data_pipeline.parts import inputs_changed
from data_pipeline.schema import LogSchema
from data_pipeline.splits import Rows

# Small enough that a loader can shuffle over row groups, large enough that reading one is no overhead.
ROW_GROUP_ROWS = 1 << 16
# Dictionaries shrink columns of few values; where there are many, Parquet builds them in vain, at half of the time of writing.
_DICTIONARY_IDS = 1 << 14
_LOGARITHMS = np.log(np.arange(1, 1 << 16)).astype(np.float32)

_ROWS_KEY = "comera_rec.rows"

IdsOf = Callable[[np.ndarray, np.ndarray, np.ndarray], int]


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A shard of a split, the sum of its labels, and how often each categorical column holds id 0."""

    split: str
    shard: Shard
    positives: int
    zeros: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PartShards:
    """What pass 2 wrote for a part."""

    written: tuple[WrittenShard, ...]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Raw columns to those of a shard: label int8 (where there is one), float32, then int32 ids, or lists of them.

    Args:
        schema: the log's.
        integers: its integer columns.
        ids_of: for each categorical column, what fills ids for (keys, missing, ids) and returns how many are 0.
        num_embeddings: of each categorical column.
    """

    schema: LogSchema
    integers: tuple[IntegerColumn, ...]
    ids_of: tuple[IdsOf, ...]
    num_embeddings: tuple[int, ...]

    @property
    def columns(self) -> pa.Schema:
        """The columns of a shard."""
        label = [(LABEL, pa.int8())] if self.schema.labelled else []
        integers = [(name, pa.float32()) for name in self.schema.integers]
        singles = [(name, pa.int32()) for name in self.schema.singles]
        return pa.schema(label + integers + singles + [(name, pa.list_(pa.int32())) for name in self.schema.lists])

    def encode(self, parsed: Parsed, rows: Rows) -> tuple[pa.Table, np.ndarray]:
        """Encode rows, in their order, and tell how many ids of each categorical column are 0."""
        arrays = [pa.array(parsed.label[rows])] if self.schema.labelled else []
        for values, missing, column in zip(parsed.integers, parsed.integer_missing, self.integers, strict=True):
            arrays.append(pa.array(encode_integers(values[rows], missing[rows], column)))
        zeros = []
        for number in range(len(self.ids_of)):
            ids, lengths, at_zero = self.ids(parsed, number, rows)
            zeros.append(at_zero)
            if lengths is None:
                arrays.append(pa.array(ids))
            else:
                arrays.append(pa.ListArray.from_arrays(np.append(0, np.cumsum(lengths)).astype(np.int32), ids))
        return pa.table(arrays, schema=self.columns), np.array(zeros, np.int64)

    def ids(self, parsed: Parsed, number: int, rows: Rows) -> tuple[np.ndarray, np.ndarray | None, int]:
        """The int32 ids of a categorical column in rows, in a list column the lengths of lists, and how many ids are 0."""
        lengths = None
        if number < len(parsed.keys):
            keys, missing = parsed.keys[number][rows], parsed.key_missing[number][rows]
        else:
            keys, lengths = list_elements(parsed, number - len(parsed.keys), rows)
            missing = np.zeros(len(keys), np.bool_)
        ids = np.empty(len(keys), np.int32)
        zeros = self.ids_of[number](keys, missing, ids)
        return ids, lengths, zeros

    def writer(self, path: Path) -> pq.ParquetWriter:
        """A writer of shards. Statistics of row groups would be of use to nobody: ids are read, not searched."""
        small = [name for name, size in zip(self.schema.categories, self.num_embeddings, strict=True) if size <= _DICTIONARY_IDS]
        small = [f"{name}.list.element" if name in self.schema.lists else name for name in small]
        options: dict[str, Any] = {"use_dictionary": [*self.schema.integers, *small], "write_statistics": False}
        return pq.ParquetWriter(path, self.columns, compression="lz4", **options)


def encode_integers(values: np.ndarray, missing: np.ndarray, column: IntegerColumn) -> np.ndarray:
    """float32 log(max(x, min) + offset), (x - mean) / scale or x, and 0.0 where x is missing."""
    if column.transform == "none":
        return values.astype(np.float32, copy=False)
    if column.mean is not None and column.scale is not None:
        return np.where(missing, 0, (values - column.mean) / column.scale).astype(np.float32)
    if values.dtype == np.float64:
        scaled = np.log(np.maximum(values, 2 - column.offset) + column.offset)
        return np.where(missing, 0, scaled).astype(np.float32)
    encoded = np.empty(len(values), np.float32)
    _encode_integers(values, missing, 2 - column.offset, _LOGARITHMS, encoded)
    return encoded


@numba.njit(nogil=True, cache=True)
def _encode_integers(values, missing, low, logarithms, encoded):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        above = max(np.int64(values[i]) - low, 0) + 1
        if missing[i]:
            encoded[i] = 0
        elif above < len(logarithms):
            encoded[i] = logarithms[above]
        else:
            encoded[i] = np.log(np.float64(above + 1))


def write_part(
    parsed: Parsed, encoder: Encoder, data: Path, *, rows: Mapping[str, Rows], shards: Mapping[str, Shard]
) -> PartShards:
    """Encode a part.

    Args:
        parsed: the part.
        encoder: of its columns.
        data: the data set's folder.
        rows: of each split.
        shards: of each split that has rows in the part, what is known of its shard before it is written.
    """
    written = []
    for split, shard in shards.items():
        chosen = np.arange(parsed.rows)[rows[split]]
        if len(chosen) != shard.rows:
            raise inputs_changed()
        zeros = np.zeros(len(encoder.ids_of), np.int64)
        contiguous = isinstance(rows[split], slice)
        with replacing(data / shard.path) as beside, encoder.writer(beside) as writer:
            for start in range(0, len(chosen), ROW_GROUP_ROWS):
                group = chosen[start : start + ROW_GROUP_ROWS]
                table, at_zero = encoder.encode(parsed, slice(int(group[0]), int(group[-1]) + 1) if contiguous else group)
                writer.write_table(table)
                zeros += at_zero
            writer.add_key_value_metadata({_ROWS_KEY: f"{split} {shard.from_rows}"})
        positives = int(parsed.label[rows[split]].sum()) if encoder.schema.labelled else 0
        described = replace(describe_file(shard.path, data, rows=shard.rows), from_rows=shard.from_rows)
        written.append(WrittenShard(split=split, shard=described, positives=positives, zeros=tuple(map(int, zeros))))
    return PartShards(written=tuple(written))


def recorded_rows(path: Path) -> tuple[str, tuple[int, int]] | None:
    """The split of a shard and the range of its rows in the input, as `write_part` recorded them in it."""
    match = re.fullmatch(rb"(\w+) \((\d+), (\d+)\)", (pq.read_metadata(path).metadata or {}).get(_ROWS_KEY.encode(), b""))
    return (match[1].decode(), (int(match[2]), int(match[3]))) if match else None
