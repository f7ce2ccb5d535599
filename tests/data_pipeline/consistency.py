"""Data sets are what their manifests say: files, ids, labels, sums, and vocabularies with the tables that encode them."""

import itertools
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline import manifest as files
from data_pipeline.hashing import IdSource, encode_keys
from data_pipeline.manifest import CategoricalColumn, Manifest
from data_pipeline.similarity import band_of


def verify(manifest: Manifest, folder: Path) -> None:
    """Compare the contents of all files with the manifest."""
    files.verify(manifest, folder)
    assert sum(split.rows for split in manifest.splits.values()) == manifest.rows.written
    tables = {}
    for name, split in manifest.splits.items():
        shards = [pq.read_table(folder / shard.path) for shard in split.shards]
        assert [len(shard) for shard in shards] == [shard.rows for shard in split.shards]
        tables[name] = pa.concat_tables(shards) if shards else None
        if tables[name] is not None:
            _require_rows(manifest, name, tables[name])
    for column in manifest.categorical_columns:
        train = tables["train"]
        _require_vocabulary(column, folder, None if manifest.transformed or train is None else _ids(train, column))


def _ids(table: pa.Table, column: CategoricalColumn) -> np.ndarray:
    cells = table.column(column.name).combine_chunks()
    ids: np.ndarray = (cells.flatten() if column.is_list else cells).to_numpy(zero_copy_only=False)
    return ids


def _require_rows(manifest: Manifest, split: str, table: pa.Table) -> None:
    for target in (*manifest.labels, *([manifest.weight] if manifest.weight else [])):
        values = table.column(target.name).to_numpy()
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert target is manifest.weight or values.max(initial=0) <= 1
        assert math.isclose(target.split_means[split], values.mean(dtype=np.float64), rel_tol=1e-9)
    for integer in manifest.integer_columns:
        values = table.column(integer.name).to_numpy()
        assert np.isfinite(values).all()
        assert integer.transform != "log" or (values >= 0).all()
    for column in manifest.categorical_columns:
        ids = _ids(table, column)
        assert column.rows_at_zero[split] == (ids == 0).sum()
        assert not len(ids) or 0 <= ids.min() <= ids.max() < column.num_embeddings


def _require_vocabulary(column: CategoricalColumn, folder: Path, train_ids: np.ndarray | None) -> None:
    """Check that values are listed by falling count, if only from band to band, and that the table gives them their ids."""
    if not column.min_count:
        return
    assert column.vocabulary
    assert column.table
    vocabulary = pq.read_table(folder / column.vocabulary.path)
    values, counts = (vocabulary.column(name).to_numpy() for name in ("value", "count"))
    assert len(values) + 1 == column.num_embeddings
    assert (counts >= column.min_count).all()
    firsts = [0, *(number - 1 for number in column.grown), len(values)]  # of the sequences of falling counts
    for first, end in itertools.pairwise(firsts):
        if first == 0 and column.order == "similarity":
            bands = band_of(np.arange(end))
            for band in np.unique(bands)[:-1]:
                assert counts[:end][bands == band].min() >= counts[:end][bands > band].max()
        else:
            assert np.array_equal(np.lexsort((values[first:end], -counts[first:end])), np.arange(end - first))
    ids, _ = encode_keys([IdSource(folder / column.table.path, values.dtype)], values[np.newaxis], np.zeros((1, len(values)), bool))
    assert np.array_equal(ids[0], np.arange(1, len(values) + 1))
    assert train_ids is None or (train_ids > 0).sum() == counts.sum()
