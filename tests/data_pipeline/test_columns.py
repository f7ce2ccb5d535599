"""Kinds and settings of columns: stored values equal those of a few lines of NumPy, and requests get the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_formats import read

from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import CategoricalColumn, IntegerColumn, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import Column, LogSchema, read_schema
from data_pipeline.transform import TransformOptions, transform
from data_pipeline.verify import verify

SCHEMA = """
format = "{format}"
separator = ","
header = true
[columns]
clicked = "label"
price = "float"
rating = {{ kind = "float", transform = "standardize", column = "stars" }}
age = {{ kind = "integer", transform = "standardize" }}
weight = {{ kind = "float", transform = "none" }}
nanos = "int64"
item = {{ kind = "category", max_ids = 3 }}
user = {{ kind = "category", hash_buckets = 50 }}
city = "category"
seen = {{ kind = "list", separator = " ", max_length = 2 }}
"""
ROWS = 300


def log() -> pd.DataFrame:
    draw = np.random.default_rng(3)
    is_present = draw.random(ROWS) < 0.8
    return pd.DataFrame(
        {
            "clicked": draw.integers(0, 2, ROWS),
            "price": np.where(is_present, draw.exponential(3, ROWS).round(3), np.nan),
            "stars": np.where(is_present, draw.normal(4, 2, ROWS).round(2), np.nan),
            "age": draw.integers(-5, 90, ROWS),
            "weight": draw.normal(0, 1, ROWS).round(4),
            "nanos": draw.integers(-(2**40), 2**62, ROWS),
            "item": draw.choice(["a", "b", "c", "d", "e"], ROWS, p=[0.4, 0.3, 0.15, 0.1, 0.05]),
            "user": draw.integers(0, 9, ROWS),
            "city": draw.choice(["x", "y"], ROWS),
            "seen": [" ".join(draw.choice(["s", "t", "u"], draw.integers(0, 5))) for _ in range(ROWS)],
        }
    )


@pytest.fixture(params=["csv", "parquet"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    frame = log()
    path = tmp_path / f"log.{request.param}"
    if request.param == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.assign(seen=frame["seen"].str.split()).to_parquet(path, index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA.format(format="csv"))
    options = PreprocessOptions(
        inputs=(path,), output=tmp_path / "data", schema=read_schema(tmp_path / "schema.toml"), part_bytes=5000, min_count=1
    )
    verify(preprocess(options), options.output)
    return options.output


def whole(data: Path) -> pd.DataFrame:
    return pd.concat([read(data, split) for split in ("train", "val", "test")], ignore_index=True)


def test_numbers(data: Path) -> None:
    frame, rows = log(), whole(data)
    train = frame[:240]
    for name in ("price", "nanos"):
        low = train[name].min()
        expected = np.log(np.maximum(frame[name], low) + 2 - low).fillna(0)
        np.testing.assert_allclose(rows[name], expected, rtol=1e-6)
    for name, source in (("rating", "stars"), ("age", "age")):
        expected = ((frame[source] - train[source].mean()) / train[source].std(ddof=0)).fillna(0)
        np.testing.assert_allclose(rows[name], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows["weight"], frame["weight"].astype(np.float32))
    columns = {column.name: column for column in read_manifest(data).integer_columns}
    assert list(columns) == ["price", "rating", "age", "weight", "nanos"]
    assert columns["rating"].missing == frame["stars"].isna().sum()
    assert (columns["age"].min, type(columns["nanos"].max)) == (train["age"].min(), int)
    assert columns["weight"] == IntegerColumn(
        name="weight", missing=0, offset=0, min=train["weight"].min(), max=train["weight"].max(), transform="none"
    )


def test_categories(data: Path) -> None:
    frame, rows = log(), whole(data)
    columns: dict[str, CategoricalColumn] = {column.name: column for column in read_manifest(data).categorical_columns}
    frequent = {value: i for i, value in enumerate(frame["item"][:240].value_counts().index[:3], start=1)}
    assert rows["item"].tolist() == [frequent.get(value, 0) for value in frame["item"]]
    assert (columns["item"].num_embeddings, columns["item"].distinct) == (4, 5)
    assert (columns["user"].num_embeddings, columns["user"].vocabulary, columns["user"].min_count) == (50, None, 0)
    assert rows.groupby(frame["user"])["user"].nunique().eq(1).all()
    assert columns["city"].num_embeddings == 3
    lengths = frame["seen"].str.split().str.len()
    assert rows["seen"].str.len().tolist() == lengths.clip(upper=2).tolist()
    assert columns["seen"].missing == (lengths == 0).sum()


def test_logarithms_of_integers_that_floats_cannot_represent(tmp_path: Path) -> None:
    least = 57278848240196864
    (tmp_path / "log").write_text("".join(f"1\t{least + step}\n" for step in (0, 0, 80, 1 << 56)))
    schema = LogSchema(columns=(Column(name="label", kind="label"), Column(name="nanos", kind="int64")))
    preprocess(
        PreprocessOptions(inputs=(tmp_path / "log",), output=tmp_path / "data", schema=schema, val_fraction=0, test_fraction=0)
    )
    np.testing.assert_allclose(read(tmp_path / "data", "train")["nanos"], np.log([2, 2, 82, (1 << 56) + 2]), rtol=1e-6)


def test_requests_and_new_logs_get_the_same_numbers(data: Path, tmp_path: Path) -> None:
    rows, frame = whole(data), log().rename(columns={"stars": "rating"})
    requests = [
        {name: None if cell != cell else cell for name, cell in row.items()}
        | {"seen": row["seen"].split(), "user": str(row["user"])}
        for row in frame.to_dict("records")
    ]
    flat = RequestEncoder(data)(requests)
    np.testing.assert_array_equal(flat.dense, rows[["price", "rating", "age", "weight", "nanos"]].to_numpy())
    np.testing.assert_array_equal(flat.values[:ROWS], rows["item"])
    np.testing.assert_array_equal(flat.lengths[3 * ROWS :], rows["seen"].str.len())
    with pytest.raises(ValueError, match=r"row 0: nanos is 1\.5, which is not a 64-bit integer or null"):
        RequestEncoder(data)([requests[0] | {"nanos": 1.5}])
    again = TransformOptions(inputs=tuple(tmp_path.glob("log.*")), data=data, output=tmp_path / "again", split="val")
    verify(transform(again), again.output)
    pd.testing.assert_frame_equal(read(again.output, "val"), rows)


def test_other_settings_are_refused(data: Path, tmp_path: Path) -> None:
    """They would give numbers that differ from those that the model was trained on."""
    for before, after, message in (
        (
            ', transform = "standardize", column',
            ", column",
            r"rating \(float\) where rating \(float, transform standardize\) is expected",
        ),
        ("max_length = 2", "max_length = 3", r"seen \(list, max_length 3\) where seen \(list, max_length 2\) is expected"),
        ("hash_buckets = 50", "hash_buckets = 60", r"user \(category, hash_buckets 60\) where user \(category, hash_buckets 50\)"),
    ):
        (tmp_path / "other.toml").write_text(SCHEMA.format(format="csv").replace(before, after))
        other = read_schema(tmp_path / "other.toml")
        with pytest.raises(ValueError, match=message):
            transform(TransformOptions(inputs=tuple(tmp_path.glob("log.*")), data=data, output=tmp_path / "new", schema=other))


@pytest.mark.parametrize("cell", ["inf", "nan", "1e999", "1,5", "0x1", "--1", "1e"])
def test_texts_that_are_not_numbers(tmp_path: Path, write_log: Callable[..., Path], cell: str) -> None:
    (tmp_path / "schema.toml").write_text('separator = ";"\n[columns]\nx = "float"\n')
    log = write_log(f"1\n.5\n-2e3\n\n{cell}\n".replace("\n\n", "\n").encode())
    with pytest.raises(ValueError, match=rf"log.tsv:4: x '{cell}' is not a finite number"):
        preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "data", schema=read_schema(tmp_path / "schema.toml")))
