"""Rows with columns of all kinds, in any format, give what a few lines of Python compute, in data sets and for requests alike."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from consistency import verify
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_logs import make, read

from data_pipeline import tables
from data_pipeline.encoder import Flat, RequestEncoder
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.reference import hash_text, hashed_id
from data_pipeline.schema import Column, LogSchema
from data_pipeline.transform import TransformOptions, transform

TEXTS = st.sampled_from(["a", "a", "b", "c", "é", "7", "x y", '"', ",", "NA ", "\U0001f600", "nan", "long" * 200])
FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "click": st.integers(0, 1),
    "buy": st.integers(0, 1),
    "importance": st.floats(0, 100),
    "count": st.none() | st.integers(-9, 9) | st.sampled_from([-(2**31), 2**31 - 1]),
    "rating": st.none() | st.integers(-90, 90).map(lambda tenths: 1e6 + tenths / 10),
    "nanos": st.none() | st.integers(-(2**63), 2**63 - 1),
    "price": st.none() | FLOATS,
    "code": st.none() | st.integers(0, 3).map("{:x}".format) | st.integers(0, 2**32 - 1).map("{:08X}".format),
    "shop": st.none() | TEXTS,
    "item": st.none() | TEXTS,
    "user": st.none() | TEXTS,
    "tags": st.lists(TEXTS.filter(lambda text: " " not in text), max_size=4),
}
COLUMNS = (
    Column(name="click", kind="label"),
    Column(name="buy", kind="label"),
    Column(name="importance", kind="weight"),
    Column(name="count", kind="integer"),
    Column(name="stars", kind="float", transform="standardize", column="rating"),
    Column(name="nanos", kind="int64", transform="none"),
    Column(name="price", kind="float"),
    Column(name="code", kind="hex"),
    Column(name="shop", kind="category"),
    Column(name="item", kind="category"),
    Column(name="user", kind="category", hash_buckets=1000),
    Column(name="tags", kind="list", separator=" ", max_length=3),
)
NUMBERS = ("count", "stars", "nanos", "price")
SINGLES = ("code", "shop", "item", "user")
FORMATS = ("text", "csv", "jsonl", "parquet")
TYPES = [pa.int8(), pa.bool_(), pa.float64(), pa.int32(), pa.float64(), pa.int64(), pa.float32()]
TYPES += [pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.binary_view(), pa.large_string(), pa.list_(pa.string())]


def column_of(rows: Sequence[dict[str, Any]], column: Column, train: int, min_count: int = 2) -> list[Any]:
    """Compute the stored values of a column."""
    cells = [row[column.source] for row in rows]
    present = [cell for cell in cells[:train] if cell is not None]
    if column.kind in ("label", "weight"):
        return [np.float32(cell) if column.kind == "weight" else cell for cell in cells]
    if column.kind in ("integer", "int64", "float"):
        low = min(present, default=0)
        mean, scale = (np.mean(present), np.std(present)) if present else (0, 1)
        scale = 1.0 if scale <= 1e-12 * max(map(abs, present), default=0) else scale
        transforms: dict[str, Callable[[float], float]] = {
            "log": lambda cell: float(np.log(max(float(cell), float(low)) - float(low) + 2)),
            "standardize": lambda cell: (cell - mean) / scale,
            "none": float,
        }
        return [0.0 if cell is None else transforms[column.transform](cell) for cell in cells]
    as_key = (lambda text: int(text, 16)) if column.kind == "hex" else (lambda text: hash_text(text.encode()))
    lists = [[as_key(text) for text in (cell if column.kind == "list" else [cell] if cell else [])] for cell in cells]
    lists = [keys[: column.max_length] for keys in lists]
    counts = Counter(key for keys in lists[:train] for key in keys)
    frequent = sorted((key for key in counts if counts[key] >= min_count), key=lambda key: (-counts[key], key))
    ids = {key: number for number, key in enumerate(frequent, start=1)}
    encoded = [[hashed_id(key, column.hash_buckets) if column.hash_buckets else ids.get(key, 0) for key in keys] for keys in lists]
    return encoded if column.kind == "list" else [keys[0] if keys else 0 for keys in encoded]


def written(rows: list[dict[str, Any]], form: str) -> bytes:
    """Write rows in a format, with a column that the schema doesn't name."""
    rows = [{"other": [{"deep": None}] if form == "jsonl" else 5} | {name: row[name] for name in CELLS} for row in rows]
    if form == "jsonl":
        return b"".join(json.dumps(row, ensure_ascii=number % 2 == 0).encode() + b"\n" for number, row in enumerate(rows))
    if form == "parquet":
        file = io.BytesIO()
        names = [column.source for column in COLUMNS]
        arrays = [
            pa.array(
                [bool(row[name]) if kind == pa.bool_() else row[name] for row in rows],
                pa.string() if kind == pa.binary_view() else kind,
            ).cast(kind)
            for name, kind in zip(names, TYPES, strict=True)
        ]
        pq.write_table(pa.table(arrays, names=names), file, row_group_size=5)
        return file.getvalue()
    text = io.StringIO()
    quoting: dict[str, Any] = {"quoting": csv.QUOTE_NONE, "quotechar": None} if form == "text" else {}
    writer = csv.writer(text, delimiter="\t" if form == "text" else ",", lineterminator="\n", **quoting)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(["" if cell is None else " ".join(cell) if isinstance(cell, list) else cell for cell in row.values()])
    return text.getvalue().encode()


def assert_equal_requests(flat: Flat, frame: pd.DataFrame) -> None:
    """Check that a request's numbers are those of the data set."""
    singles = np.array([frame[name] for name in SINGLES]).ravel()
    expected = Flat(
        frame[list(NUMBERS)].to_numpy(),
        np.concatenate([singles, *frame["tags"]], dtype=np.int64),
        np.append(np.ones_like(singles), frame["tags"].str.len()).astype(np.int32),
    )
    for actual, array in zip(flat, expected, strict=True):
        assert actual.dtype == array.dtype
        np.testing.assert_array_equal(actual, array)


@pytest.mark.parametrize("form", FORMATS)
@given(
    rows=st.lists(st.fixed_dictionaries(CELLS), min_size=2, max_size=30),
    others=st.lists(st.fixed_dictionaries(CELLS), min_size=1, max_size=9),
    part_bytes=st.sampled_from([300, 1 << 20]),
    piece_bytes=st.sampled_from([200, 1 << 20]),
    share=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_equals_a_few_lines_of_python(
    form: str, rows: list[dict[str, Any]], others: list[dict[str, Any]], part_bytes: int, piece_bytes: int, share: float
) -> None:
    schema = LogSchema(
        columns=COLUMNS,
        separator="\t" if form == "text" else ",",
        header=True,
        format="csv" if form == "parquet" else form,  # type: ignore[arg-type]
    )
    train = len(rows) - 2 * int(len(rows) * share)
    with tempfile.TemporaryDirectory() as name, patch.object(tables, "_PIECE_BYTES", piece_bytes):
        folder = Path(name)
        (folder / "log").write_bytes(written(rows, form))
        options = PreprocessOptions(
            inputs=(folder / "log",),
            output=folder / "data",
            schema=schema,
            part_bytes=part_bytes,
            val_fraction=share,
            test_fraction=share,
        )
        manifest = preprocess(options)
        assert read_manifest(options.output) == manifest
        verify(manifest, options.output)
        actual = read(options.output)
        (folder / "others").write_bytes(written(others, form))
        new = TransformOptions(inputs=(folder / "others",), data=options.output, output=folder / "new", split="test")
        transform(new)
        encoder = RequestEncoder(options.output)
        for of_rows, frame in ((rows, actual), (others, read(new.output))):
            assert_equal_requests(encoder([{**row, "stars": row["rating"]} for row in of_rows]), frame)
        actual = pd.concat([actual, read(new.output)])
    assert list(actual) == [column.name for column in COLUMNS]
    for column in COLUMNS:
        expected = column_of(rows + others, column, train)
        if column.name in NUMBERS or column.kind == "weight":
            np.testing.assert_allclose(
                actual[column.name], np.array(expected, np.float32), rtol=2e-6, atol=1e-5, err_msg=column.name
            )
        else:
            assert [list(cell) if column.kind == "list" else cell for cell in actual[column.name]] == expected, column.name
    missing = {column.name: column.missing for column in (*manifest.integer_columns, *manifest.categorical_columns)}
    assert missing == {column.name: sum(row[column.source] in (None, []) for row in rows) for column in COLUMNS[3:]}
    weights = [row["importance"] for row in rows[:train]]
    assert manifest.weight is not None
    assert manifest.weight.split_means["train"] == pytest.approx(np.mean(weights), rel=1e-6)
    assert [label.split_means["train"] for label in manifest.labels] == pytest.approx(
        [np.mean([row[name] for row in rows[:train]]) for name in ("click", "buy")]
    )


REQUESTS = LogSchema(
    columns=(
        Column(name="cents", kind="integer"),
        Column(name="tags", kind="list", separator=" "),
        Column(name="code", kind="hex"),
        Column(name="shop", kind="category"),
    ),
    separator=",",
)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    (tmp_path / "log").write_text("".join(f"{i % 9 - 2},a b a,{i % 5:x},shop {i % 3}\n" for i in range(60)))
    make(tmp_path / "log", tmp_path / "data", schema=REQUESTS)
    return tmp_path / "data"


EVERY_KIND: dict[str, Any] = {"cents": 1, "tags": [], "code": "1", "shop": "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cents": "3"}, "cents is '3', which is not a 32-bit integer or null"),
        ({"cents": True}, "cents is True, which is not a 32-bit integer"),
        ({"cents": 1 << 31}, "cents is 2147483648, which is not a 32-bit integer"),
        ({"code": 17}, "code is 17, which is not a string of 1 to 8 hex digits or null"),
        ({"code": "0x1f"}, "code is '0x1f', which is not a string of 1 to 8 hex digits"),
        ({"code": "\u0661"}, r"code is '\\u0661', which is not"),
        ({"code": ["1"]}, r"code is \['1'\], which is not"),
        ({"shop": 5.0}, r"shop is 5\.0, which is not a string, an integer or null"),
        ({"shop": "\ud800"}, r"shop is '\\ud800', which is not a string"),
        ({"tags": "a b"}, "tags is 'a b', which is not a list of non-empty strings or integers, or null"),
        ({"tags": ["a", ""]}, r"tags is \['a', ''\], which is not a list"),
        ({"tags": ["a", 1.5]}, r"tags is \['a', 1\.5\], which is not a list"),
        ({"tags": [None]}, r"tags is \[None\], which is not a list"),
    ],
)
def test_cells_refused(requests: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"row 1: {message}"):
        RequestEncoder(requests)([EVERY_KIND, EVERY_KIND | change])


def test_other_names_and_no_rows(requests: Path) -> None:
    encoder = RequestEncoder(requests)
    encoder([EVERY_KIND | {"unknown": object()}])
    assert [len(array) for array in encoder([])] == [0, 0, 0]
    with pytest.raises(ValueError, match="row 1 has no code; give null where its value is missing"):
        encoder([EVERY_KIND, {"cents": 1, "tags": [], "shop": "a"}])
    with pytest.raises(ValueError, match="row 0 is 5, which is not an object with a value for each column"):
        encoder([5])  # type: ignore[list-item]
