"""Compiled loops for ids and logarithms agree with obvious implementations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import hashing, native
from data_pipeline.hashing import IdSource, encode_keys, open_tables, write_table
from data_pipeline.native import Array
from data_pipeline.reference import hashed_id

DTYPES = [np.dtype(np.uint32), np.dtype(np.uint64)]


@settings(max_examples=100)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), buckets=st.integers(2, 1 << 31), room=st.sampled_from([None, 0, 1 << 20]))
def test_ids_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: np.dtype, buckets: int, room: int | None
) -> None:
    """Ids by table, in memory or not, and by hash, for rows in the middle of an array."""
    key = st.one_of(st.integers(0, 9), st.integers(0, 2 ** (8 * dtype.itemsize) - 1))
    values = data.draw(st.lists(key, unique=True, max_size=20))
    path = tmp_path_factory.mktemp("table") / "C1.table"
    write_table(path, lambda: [np.array(values[:5], dtype), np.array(values[5:], dtype)], len(values), dtype)
    ids = {value: number for number, value in enumerate(values, start=1)}
    asked = data.draw(st.lists(st.tuples(key, st.booleans()), max_size=30))
    keys = np.array([[value for value, _ in asked] + [7]] * 2, dtype)[:, :-1]
    missing = np.array([[gone for _, gone in asked] + [True]] * 2, np.bool_)[:, :-1]
    (table,) = open_tables([path], dtype, room=room)
    got, zeros = encode_keys([table, IdSource(buckets=buckets)], keys, missing)
    by_table = [0 if gone else ids.get(value, 0) for value, gone in asked]
    by_hash = [0 if gone else hashed_id(value, buckets) for value, gone in asked]
    assert got.tolist() == [by_table, by_hash]
    assert zeros.tolist() == [by_table.count(0), by_hash.count(0)]


def test_large_tables_are_written_range_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_RANGE_BYTES", 1 << 14)
    keys = np.random.default_rng(0).choice(1 << 32, 20_000, replace=False).astype(np.uint32)
    write_table(tmp_path / "C1.table", lambda: np.split(keys, 4), len(keys), keys.dtype)
    wanted = np.arange(1, len(keys) + 1)
    for room in (None, 1, 1 << 16):
        for order in (np.arange(len(keys)), np.random.default_rng(1).permutation(len(keys))):
            table = IdSource(tmp_path / "C1.table", keys.dtype, room)
            ids, _ = encode_keys([table], keys[order][None], np.zeros((1, len(keys)), np.bool_))
            assert np.array_equal(ids[0], wanted[order])


@pytest.mark.parametrize("pairs", [[], [[1, 7], [2, 8]]])
def test_a_table_without_free_slots_is_searched_once(tmp_path: Path, pairs: list[list[int]]) -> None:
    """A search must end even in a table from an untrusted file."""
    np.array(pairs, np.uint32).tofile(tmp_path / "C1.table")
    keys = np.array([[1, 2, 3]], np.uint32)
    ids, _ = encode_keys([IdSource(tmp_path / "C1.table", keys.dtype)], keys, np.zeros((1, 3), np.bool_))
    assert ids.tolist() == ([[7, 8, 0]] if pairs else [[0, 0, 0]])


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (np.zeros((1, 4), np.uint32), np.zeros((1, 3), np.bool_)),
        (np.zeros((1, 4), np.uint32), np.zeros((2, 4), np.bool_)),
        (np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.bool_)),
    ],
)
def test_arrays_of_other_sizes_are_refused(keys: np.ndarray, missing: np.ndarray) -> None:
    with pytest.raises(RuntimeError, match="encode_keys_u32: the sizes of the arrays don't fit each other"):
        encode_keys([IdSource(buckets=5)], keys, missing)


@pytest.mark.parametrize("offsets", [[0, 1 << 40, 5], [0, 3, 2], [-1, 0, 5], [0, 3, 6], [0, 5]])
def test_texts_beyond_their_bytes_are_refused(offsets: list[int]) -> None:
    arrays = (np.zeros(5, np.uint8), np.array(offsets, np.int64), np.zeros(2, np.uint64), np.zeros(2, np.bool_))
    with pytest.raises(RuntimeError, match="hash_texts: the sizes of the arrays don't fit each other"):
        native.hash_texts(*(Array(array, array.dtype) for array in arrays))
