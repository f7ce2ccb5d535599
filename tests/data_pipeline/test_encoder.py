"""A request is encoded to the numbers that the pipeline writes for the same row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import random_rows

from data_pipeline.encoder import Flat, RequestEncoder
from data_pipeline.manifest import read_manifest
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.schema import LogSchema, criteo_schema, read_schema
from data_pipeline.transform import TransformOptions, transform

SCHEMA = """
separator = ","
[columns]
cents = "integer"
tags = { kind = "list", separator = " " }
code = "hex"
shop = "category"
words = { kind = "list", separator = ";" }
"""


@pytest.fixture(scope="module", params=["criteo", "schema", "hashed"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with Criteo's columns or with columns of every kind, with vocabularies or hashed ids."""
    folder = tmp_path_factory.mktemp("encoder")
    log, schema, buckets = folder / "log", None, None
    if request.param == "criteo":
        log.write_text("".join("\t".join(row) + "\n" for row in random_rows(500)))
    else:
        log.write_text(
            "".join(f"{i % 9 - 2 if i % 4 else ''},{'a b a' if i % 3 else ''},{i % 5:x},é{i % 3},w{i % 4}\n" for i in range(60))
        )
        (folder / "schema.toml").write_text(SCHEMA)
        schema, buckets = read_schema(folder / "schema.toml"), 1 << 20 if request.param == "hashed" else None
    preprocess(PreprocessOptions(inputs=(log,), output=folder / "data", schema=schema, hash_buckets=buckets))
    return folder / "data"


def cells(schema: LogSchema) -> st.SearchStrategy[dict[str, Any]]:
    """Rows with values that the data set contains, and with others."""
    text = st.sampled_from(["a", "b", "é1", "w1", "w3"]) | st.text(
        st.characters(exclude_characters=",;\t\r\n |", exclude_categories=["Cs"]), min_size=1, max_size=5
    )
    hexadecimal = st.integers(0, 8).map("{:x}".format) | st.integers(0, 2**32 - 1).map("{:08X}".format)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.none() | st.integers(-5, 20) | st.integers(-(2**31), 2**31 - 1),
        "hex": st.none() | st.just("") | hexadecimal,
        "category": st.none() | st.just("") | text,
        "list": st.none() | st.lists(text, max_size=4),
    }
    return st.fixed_dictionaries({column.name: kinds[column.kind] for column in schema.columns if column.kind in kinds})


def to_line(row: dict[str, Any], schema: LogSchema) -> str:
    texts = []
    for column in schema.columns:
        cell = row.get(column.name, 0)
        texts.append("" if cell is None else column.separator.join(cell) if column.kind == "list" else str(cell))
    return schema.separator.join(texts) + "\n"


def as_written(folder: Path, rows: list[dict[str, Any]], data: Path) -> Flat:
    """What `comera transform` writes for the rows."""
    manifest = read_manifest(data)
    assert manifest.log is not None
    log = folder / "log"
    log.write_text("".join(to_line(row, manifest.log) for row in rows), newline="")
    transform(TransformOptions(inputs=(log,), data=data, output=folder / "new", split="test", overwrite=True))
    table = pq.read_table(folder / "new" / "test")
    values, lengths = [], []
    for column in manifest.categorical_columns:
        actual = table.column(column.name).to_pylist()
        values += [id for cell in actual for id in cell] if column.is_list else actual
        lengths += [len(cell) if column.is_list else 1 for cell in actual]
    dense = np.stack([table.column(column.name).to_numpy() for column in manifest.integer_columns], axis=1)
    return Flat(dense, np.array(values, np.int64), np.array(lengths, np.int32))


def test_equals_the_pipeline(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    encoder, folder = RequestEncoder(data), tmp_path_factory.mktemp("written")
    schema = read_manifest(data).log
    assert schema is not None

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.lists(cells(schema), min_size=1, max_size=50))
    def check(rows: list[dict[str, Any]]) -> None:
        for actual, expected in zip(encoder(rows), as_written(folder, rows, data), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)

    check()


def test_no_rows(data: Path) -> None:
    dense, values, lengths = RequestEncoder(data)([])
    assert dense.shape == (0, len(read_manifest(data).integer_columns))
    assert len(values) == len(lengths) == 0


CRITEO: dict[str, Any] = {name: "1" if name[0] == "C" else 1 for name in criteo_schema(labeled=False).of_kind("integer", "hex")}
EVERY_KIND: dict[str, Any] = {"cents": 1, "tags": [], "code": "1", "shop": "a", "words": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"I3": "3"}, "row 1: I3 is '3', which is not a 32-bit integer or null"),
        ({"I3": 3.5}, r"row 1: I3 is 3\.5, which is not a 32-bit integer"),
        ({"I3": float("nan")}, "row 1: I3 is nan, which is not a 32-bit integer"),
        ({"I3": True}, "row 1: I3 is True, which is not a 32-bit integer"),
        ({"I3": 1 << 31}, "row 1: I3 is 2147483648, which is not a 32-bit integer"),
        ({"C4": 17}, "row 1: C4 is 17, which is not a string of 1 to 8 hex digits or null"),
        ({"C4": "0x1f"}, "row 1: C4 is '0x1f', which is not a string of 1 to 8 hex digits"),
        ({"C4": "123456789"}, "row 1: C4 is '123456789', which is not"),
        ({"C4": "\u0661"}, r"row 1: C4 is '\\u0661', which is not"),
        ({"C4": "x" * 99}, r"row 1: C4 is 'x{12}\.\.\.x{13}', which is not"),
        ({"C4": ["1"]}, r"row 1: C4 is \['1'\], which is not"),
    ],
)
def test_criteo_rows_refused(tmp_path: Path, write_log: Callable[..., Path], change: dict[str, Any], message: str) -> None:
    preprocess(PreprocessOptions(inputs=(write_log(random_rows(30)),), output=tmp_path / "data"))
    encoder = RequestEncoder(tmp_path / "data")
    encoder([CRITEO, CRITEO | {"label": 1, "unknown": object()}])
    with pytest.raises(ValueError, match=message):
        encoder([CRITEO, CRITEO | change])
    without = {name: cell for name, cell in CRITEO.items() if name not in change}
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"row 1 has no {name}; give null where its value is missing"):
        encoder([CRITEO, without])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shop": 5.0}, r"row 0: shop is 5\.0, which is not a string, an integer or null"),
        ({"shop": "\ud800"}, r"row 0: shop is '\\ud800', which is not a string"),
        ({"tags": "a b"}, "row 0: tags is 'a b', which is not a list of non-empty strings or integers, or null"),
        ({"tags": ["a", ""]}, r"row 0: tags is \['a', ''\], which is not a list"),
        ({"tags": ["a", 1.5]}, r"row 0: tags is \['a', 1\.5\], which is not a list"),
        ({"tags": [None]}, r"row 0: tags is \[None\], which is not a list"),
    ],
)
def test_text_and_lists_refused(data: Path, change: dict[str, Any], message: str) -> None:
    if "shop" not in {column.name for column in read_manifest(data).categorical_columns}:
        pytest.skip("Criteo's columns hold no text and no lists")
    with pytest.raises(ValueError, match=message):
        RequestEncoder(data)([EVERY_KIND | change])
    with pytest.raises(ValueError, match="row 0 is 5, which is not an object with a value for each column"):
        RequestEncoder(data)([5])  # type: ignore[list-item]
