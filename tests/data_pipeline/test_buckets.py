"""Bucketized numbers: ids of ranges in shards, requests, new logs and `comera lookup`, as computed by NumPy and pandas."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import files_of, read

from data_pipeline.buckets import keys_of_numbers, numbers_of_keys, quantiles
from data_pipeline.encoder import RequestEncoder
from data_pipeline.hashing import BucketIds, encode_keys
from data_pipeline.inspection import find_id, find_text
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.reference import bucket
from data_pipeline.schema import read_schema
from data_pipeline.transform import TransformOptions, transform
from data_pipeline.verify import verify

ROWS = 400
SCHEMA = """
separator = ","
header = true
[columns]
click = "label"
age = { kind = "integer", transform = "bucketize", boundaries = [18, 30.5, 60] }
price = { kind = "float", transform = "bucketize", buckets = 5 }
few = { kind = "float", transform = "bucketize", buckets = 8 }
none = { kind = "float", transform = "bucketize", buckets = 3 }
stars = "integer"
shop = "category"
"""
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def log() -> pd.DataFrame:
    draw = np.random.default_rng(1)
    present = draw.random(ROWS) < 0.9
    return pd.DataFrame(
        {
            "click": draw.integers(0, 2, ROWS),
            "age": pd.Series(np.where(present, draw.integers(-3, 90, ROWS), np.nan)).astype("Int64"),
            "price": np.where(present, draw.normal(0, 9, ROWS).round(2), np.nan),
            "few": draw.choice([-1.0, 0.0, 5.0], ROWS, p=[0.1, 0.8, 0.1]),
            "none": np.nan,
            "stars": draw.integers(1, 6, ROWS),
            "shop": draw.choice(["a", "b"], ROWS),
        }
    )


@pytest.fixture
def data(tmp_path: Path) -> tuple[Manifest, Path]:
    log().to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    options = PreprocessOptions(
        inputs=(tmp_path / "log.csv",), output=tmp_path / "data", schema=read_schema(tmp_path / "schema.toml"), part_bytes=3000
    )
    preprocess(options)
    verify(read_manifest(options.output), options.output)
    log().to_parquet(tmp_path / "log.parquet")
    other = replace(options, inputs=(tmp_path / "log.parquet",), output=tmp_path / "other", part_bytes=1 << 20)
    preprocess(other)
    for split in ("train", "val", "test"):
        pd.testing.assert_frame_equal(read(other.output, split), read(options.output, split))
    return read_manifest(options.output), options.output


def test_ids_of_ranges(data: tuple[Manifest, Path]) -> None:
    manifest, frame = data[0], log()
    rows = pd.concat([read(data[1], split) for split in ("train", "val", "test")], ignore_index=True)
    columns = {column.name: column for column in manifest.categorical_columns}
    assert [column.name for column in manifest.integer_columns] == ["stars"]
    expected = np.where(frame["age"].isna(), 0, np.digitize(frame["age"].fillna(0).astype(float), [18, 30.5, 60]) + 1)
    np.testing.assert_array_equal(rows["age"], expected)
    assert (columns["age"].num_embeddings, columns["age"].boundaries, columns["age"].vocabulary) == (5, (18, 30.5, 60), None)
    train = np.sort(frame["price"][:320].dropna())
    boundaries = columns["price"].boundaries
    assert boundaries == tuple(train[[len(train) * i // 5 for i in range(1, 5)]])
    sizes = rows["price"][:320].value_counts()[[1, 2, 3, 4, 5]]
    assert sizes.max() - sizes.min() <= 3
    assert columns["few"].boundaries == (0.0,) or columns["few"].boundaries == (-1.0, 0.0, 5.0)
    assert (columns["none"].boundaries, columns["none"].num_embeddings, set(rows["none"])) == ((), 2, {0})
    assert columns["price"].missing == frame["price"].isna().sum()


def test_requests_and_new_logs_get_the_same_ids(data: tuple[Manifest, Path], tmp_path: Path) -> None:
    manifest, folder = data
    rows = pd.concat([read(folder, split) for split in ("train", "val", "test")], ignore_index=True)
    requests = [
        {name: None if pd.isna(cell) else int(cell) if name in ("age", "stars") else cell for name, cell in row.items()}
        for row in log().to_dict("records")
    ]
    names = [column.name for column in manifest.categorical_columns]
    flat = RequestEncoder(folder)(requests)
    np.testing.assert_array_equal(flat.values.reshape(len(names), ROWS), rows[names].to_numpy().T)
    with pytest.raises(ValueError, match=r"row 0: age is 1\.5, which is not a 32-bit integer"):
        RequestEncoder(folder)([requests[0] | {"age": 1.5}])
    again = TransformOptions(inputs=(tmp_path / "log.csv",), data=folder, output=tmp_path / "again", split="val", extend=True)
    verify(transform(again), again.output)
    pd.testing.assert_frame_equal(read(again.output, "val"), rows)
    assert all(name.startswith(("val", "vocabulary/shop")) for name in files_of(again.output))


def test_lookup(data: tuple[Manifest, Path]) -> None:
    assert find_text(*data, "age", "30.5").id == 3
    assert [find_id(*data, "age", number).text for number in (1, 3, 4)] == [
        "from ... to below 18",
        "from 30.5 to below 60",
        "from 60 to below ...",
    ]
    for text in ("old", "nan", "inf"):
        with pytest.raises(ValueError, match=f"`text` is '{text}'; values of age are finite numbers"):
            find_text(*data, "age", text)
    manifest, folder = data
    columns = [replace(c, boundaries=(0.1, 1234567.25)) if c.name == "age" else c for c in manifest.categorical_columns]
    assert find_id(replace(manifest, categorical_columns=tuple(columns)), folder, "age", 2).text == "from 0.1 to below 1234567.25"


@given(numbers=st.lists(NUMBERS, min_size=1), boundaries=st.lists(NUMBERS, unique=True).map(sorted))
@settings(max_examples=50, deadline=None)
def test_ids_equal_the_reference(numbers: list[float], boundaries: list[float]) -> None:
    keys = keys_of_numbers(np.array(numbers))
    np.testing.assert_array_equal(numbers_of_keys(keys), numbers)
    np.testing.assert_array_equal(np.argsort(keys, kind="stable"), np.argsort(numbers, kind="stable"))
    (ids,), (zeros,) = encode_keys([BucketIds(boundaries)], keys[np.newaxis], np.zeros((1, len(keys)), np.bool_))
    assert (ids.tolist(), zeros) == ([bucket(number, boundaries) for number in numbers], 0)


@given(numbers=st.lists(st.integers(-9, 9).map(float), max_size=60), buckets=st.integers(2, 9), block=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_quantiles_of_blocks(numbers: list[float], buckets: int, block: int) -> None:
    keys, counts = np.unique(keys_of_numbers(np.array(numbers)), return_counts=True)
    blocks = [(keys[at : at + block], counts[at : at + block]) for at in range(0, len(keys), block)]
    expected = {sorted(numbers)[len(numbers) * i // buckets] for i in range(1, buckets)} if numbers else set()
    assert quantiles(blocks, len(numbers), buckets) == tuple(sorted(expected))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ('transform = "bucketize"', 'a: transform = "bucketize" takes either boundaries or buckets; other'),
        ("buckets = 3", 'a: transform = "bucketize" takes either boundaries or buckets; other transforms take neither'),
        ('transform = "bucketize", buckets = 3, boundaries = [1]', "takes either boundaries or buckets"),
        ('transform = "bucketize", buckets = 1', "a: buckets is 1; it must be an integer from 2"),
        ('transform = "bucketize", boundaries = [2, 2]', "a: boundaries are [2, 2]; they must be finite numbers, each above"),
        ('transform = "bucketize", boundaries = []', "a: boundaries are []; they must be finite numbers"),
        ('transform = "bucketize", boundaries = [nan]', "a: boundaries are [nan]; they must be finite numbers"),
        ('transform = "bucketize", boundaries = [true]', "a: boundaries are [True]; they must be finite numbers"),
    ],
)
def test_bad_settings(tmp_path: Path, column: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(f'[columns]\na = {{ kind = "float", {column} }}')
    with pytest.raises(ValueError, match=re.escape(message)):
        read_schema(tmp_path / "schema.toml")
