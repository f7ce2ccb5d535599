"""Last pass: rows of raw values to encoded Parquet shards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.columns import LABEL
from data_pipeline.ingest import WORKERS
from data_pipeline.manifest import IntegerColumn, Shard, Split, file_sha256
from data_pipeline.vocabulary import Vocabulary

# Small enough that a loader can shuffle over row groups, large enough that reading one is no overhead.
ROW_GROUP_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Raw columns to those of a shard: label int8 (where the logs have one), I1..I13 float32, C1..C26 int32."""

    labelled: bool
    integers: tuple[IntegerColumn, ...]
    vocabularies: dict[str, Vocabulary]

    @property
    def schema(self) -> pa.Schema:
        """The columns of a shard."""
        label = [(LABEL, pa.int8())] if self.labelled else []
        integers = [(statistics.name, pa.float32()) for statistics in self.integers]
        return pa.schema(label + integers + [(name, pa.int32()) for name in self.vocabularies])

    def encode(self, rows: pa.Table) -> pa.Table:
        """Encode rows as parsed, in their order."""
        label = [rows.column(LABEL)] if self.labelled else []
        integers = [encode_integers(rows.column(statistics.name), statistics) for statistics in self.integers]
        ids = [vocabulary.encode(rows.column(name)) for name, vocabulary in self.vocabularies.items()]
        return pa.table([*label, *map(pa.array, integers + ids)], schema=self.schema)


def encode_integers(column: pa.ChunkedArray, statistics: IntegerColumn) -> np.ndarray:
    """float32 log(max(x, min) + offset), and 0.0 where x is missing."""
    low = 2 - statistics.offset
    values = column.cast(pa.float64()).fill_null(low).to_numpy()
    encoded: np.ndarray = np.log(np.maximum(values, low) + statistics.offset).astype(np.float32)
    encoded[column.is_null().to_numpy()] = 0
    return encoded


@dataclass(frozen=True, kw_only=True)
class WrittenSplit:
    """A split on disk, and how many of its rows hold id 0 in each categorical column."""

    split: Split
    rows_at_zero: Counter[str]


def write_splits(splits: dict[str, pa.Table], encoder: Encoder, folder: Path, *, rows_per_shard: int) -> dict[str, WrittenSplit]:
    """Encode and write every split to folder/<split>/part-*.parquet, several shards at a time."""

    def write(path: str, rows: pa.Table) -> tuple[Shard, Counter[str]]:
        at_zero = _write_shard(folder / path, rows, encoder)
        return describe_file(path, folder, rows=len(rows)), at_zero

    written = {}
    total = sum(len(rows) for rows in splits.values())
    with ThreadPoolExecutor(WORKERS) as pool, tqdm(total=total, desc="writing", unit="row", disable=None) as bar:
        for name, rows in splits.items():
            (folder / name).mkdir()
            tables = [rows.slice(start, rows_per_shard) for start in range(0, len(rows), rows_per_shard)]
            paths = [f"{name}/part-{number:05d}.parquet" for number in range(len(tables))]
            shards, at_zero = [], Counter[str]()
            for shard, counts in pool.map(write, paths, tables):
                shards.append(shard)
                at_zero += counts
                bar.update(shard.rows)
            written[name] = WrittenSplit(split=Split(rows=len(rows), shards=tuple(shards)), rows_at_zero=at_zero)
    return written


def _write_shard(path: Path, rows: pa.Table, encoder: Encoder) -> Counter[str]:
    """Write one row group at a time, so that memory does not follow the size of a shard."""
    at_zero = Counter[str]()
    with pq.ParquetWriter(path, encoder.schema, compression="lz4") as writer:
        for start in range(0, len(rows), ROW_GROUP_ROWS):
            group = encoder.encode(rows.slice(start, ROW_GROUP_ROWS))
            writer.write_table(group)
            at_zero.update({name: int(np.count_nonzero(group.column(name).to_numpy() == 0)) for name in encoder.vocabularies})
    return at_zero


def describe_file(path: str, folder: Path, *, rows: int) -> Shard:
    """What the manifest says of a file that has been written."""
    file = folder / path
    return Shard(path=path, rows=rows, bytes=file.stat().st_size, sha256=file_sha256(file))
