"""Rows with columns of all kinds, in any format, give what a few lines of Python compute, in data sets and for requests alike.

Any bytes as any log give a data set that verifies, or a one-line error and no output.

FUZZ=10000 pytest --timeout=0 tests/data_pipeline/test_data_sets.py -k any        # number of cases; takes a quarter of an hour
"""

import csv
import gzip
import io
import json
import os
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
from random_logs import make, read, schema_of
from refusals import refuse

from data_pipeline import tables
from data_pipeline.encoder import Flat, RequestEncoder
from data_pipeline.manifest import read_manifest
from data_pipeline.reference import hash_text, hashed_id
from data_pipeline.schema import Column, LogSchema
from data_pipeline.transform import TransformOptions, transform

TEXTS = st.sampled_from(["a", "a", "b", "c", "é", "7", "x y", '"', ",", "NA ", "\U0001f600", "nan", "long" * 200])
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "click": st.integers(0, 1),
    "buy": st.integers(0, 1),
    "importance": st.floats(0, 100),
    "count": st.none() | st.integers(-9, 9) | st.sampled_from([-(2**31), 2**31 - 1]),
    "rating": st.none() | st.integers(-90, 90).map(lambda tenths: 1e6 + tenths / 10),
    "nanos": st.none() | st.integers(-(2**63), 2**63 - 1),
    "price": st.none() | st.floats(-(2.0**99), 2.0**99, width=32),
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


def written(rows: list[dict[str, Any]], form: str, order: Sequence[str]) -> bytes:
    """Write rows in a format, with columns in an order, and one that the schema doesn't name."""
    rows = [{"other": [{"deep": None}] if form == "jsonl" else 5} | {name: row[name] for name in order} for row in rows]
    if form == "jsonl":
        return b"".join(json.dumps(row, ensure_ascii=number % 2 == 0).encode() + b"\n" for number, row in enumerate(rows))
    if form == "parquet":
        file = io.BytesIO()
        names = [column.source for column in COLUMNS]
        written_as = {pa.bool_(): pa.int8(), pa.binary_view(): pa.string()}
        arrays = [
            pa.array([row[name] for row in rows], written_as.get(kind, kind)).cast(kind)
            for name, kind in zip(names, TYPES, strict=True)
        ]
        pq.write_table(pa.table(arrays, names=names).select(order), file, row_group_size=5)
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
    singles = np.array([frame[name] for name in ("code", "shop", "item", "user")]).ravel()
    expected = Flat(
        frame[list(NUMBERS)].to_numpy(),
        np.concatenate([singles, *frame["tags"]], dtype=np.int64),
        np.append(np.ones_like(singles), frame["tags"].str.len()).astype(np.int32),
    )
    for actual, array in zip(flat, expected, strict=True):
        assert actual.dtype == array.dtype
        np.testing.assert_array_equal(actual, array)


@pytest.mark.parametrize("form", ["text", "csv", "jsonl", "parquet"])
@given(
    rows=st.lists(st.fixed_dictionaries(CELLS), min_size=1, max_size=30),
    others=st.lists(st.fixed_dictionaries(CELLS), min_size=1, max_size=9),
    part_bytes=st.sampled_from([300, 1 << 20]),
    piece_bytes=st.sampled_from([200, 1 << 20]),
    share=st.sampled_from([0.0, 0.25]),
    order=st.permutations([*CELLS]),
)
@settings(max_examples=12, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_equals_a_few_lines_of_python(
    form: Any, rows: list[Any], others: list[Any], part_bytes: int, piece_bytes: int, share: float, order: list[str]
) -> None:
    separator = "\t" if form == "text" else ","
    schema = LogSchema(columns=COLUMNS, separator=separator, header=True, format="csv" if form == "parquet" else form)
    train = len(rows) - 2 * int(len(rows) * share)
    with tempfile.TemporaryDirectory() as name, patch.object(tables, "_PIECE_BYTES", piece_bytes):
        folder = Path(name)
        (folder / "log").write_bytes(written(rows, form, order))
        options = {"schema": schema, "part_bytes": part_bytes, "val_fraction": share, "test_fraction": share}
        manifest = make(folder / "log", folder / "data", **options)
        assert read_manifest(folder / "data") == manifest
        verify(manifest, folder / "data")
        actual = read(folder / "data")
        (folder / "others").write_bytes(written(others, form, order))
        new = TransformOptions(inputs=(folder / "others",), data=folder / "data", output=folder / "new", split="test")
        transform(new)
        encoder = RequestEncoder(folder / "data")
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
    distinct = {column.name: column.distinct for column in manifest.categorical_columns}
    assert (distinct["shop"], distinct["user"]) == (len({row["shop"] for row in rows} - {None}), None)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    schema = schema_of({"cents": "integer", "tags": "list", "code": "hex", "shop": "category"}, element_separator=" ")
    (tmp_path / "log").write_text("".join(f"{i % 9 - 2},a b a,{i % 5:x},shop {i % 3}\n" for i in range(60)))
    make(tmp_path / "log", tmp_path / "data", schema=schema)
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
    refuse(f"row 1: {message}", RequestEncoder(requests), [EVERY_KIND, EVERY_KIND | change])


def test_other_names_and_no_rows(requests: Path) -> None:
    encoder = RequestEncoder(requests)
    encoder([EVERY_KIND | {"unknown": object()}])
    assert np.ptp(encoder([EVERY_KIND | {"cents": 3}, EVERY_KIND | {"cents": 3.0}]).dense) == 0, "as in logs"
    assert [len(array) for array in encoder([])] == [0, 0, 0]
    refuse("row 1 has no code; give null where its value is missing", encoder, [EVERY_KIND, {"cents": 1, "tags": [], "shop": "a"}])
    refuse("row 0 is 5, which is not an object with a value for each column", encoder, [5])


CASES = int(os.environ.get("FUZZ", "60"))
ANY = settings(max_examples=CASES // 3, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
KINDS = ("label", "integer", "int64", "float", "weight", "hex", "category", "list", "time", "ignore")
BYTES = st.binary(max_size=200) | st.lists(st.sampled_from([*b'0019af,\t|"\n\r {}[]:-.e\xc3\xa4\xff'])).map(bytes)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), max_size=8) | st.sampled_from(
    ["7", "a b", '"', ","]
)


def verify_or_refuse(folder: str, schema: LogSchema, content: bytes, **options: Any) -> None:
    """Make a data set that verifies, or fail with one line and without output."""
    log, output = Path(folder, "log"), Path(folder, "data")
    log.write_bytes(content)
    try:
        manifest = make(log, output, schema=schema, workers=1, val_fraction=0, **options)
    except ValueError as error:
        said = str(error)
    else:
        return verify(manifest, output)
    assert len(said.splitlines()) == 1
    assert {path.name for path in log.parent.iterdir()} <= {"log", ".data.partial"}  # finished work is kept


@given(content=BYTES, data=st.data())
@ANY
def test_any_bytes(content: bytes, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    settings = {"separator": [",", "\t", ";"], "header": [False, True], "format": ["text", "csv", "jsonl"]}
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in settings.items()}
    schema = schema_of({f"c{number}": kind for number, kind in enumerate(kinds)}, **chosen)
    compress = data.draw(st.sampled_from([lambda text: text, gzip.compress, lambda text: pa.compress(text, "zstd", asbytes=True)]))
    packed, cut = compress(content), data.draw(st.integers(0, 3))
    with tempfile.TemporaryDirectory() as folder:
        options = {"part_bytes": data.draw(st.sampled_from([7, 1 << 20])), "max_bad_rows": data.draw(st.sampled_from([0, 99]))}
        verify_or_refuse(folder, schema, packed[: len(packed) - cut], **options)


@given(
    rows=st.lists(st.lists(st.none() | ANY_TEXT | st.integers() | st.floats() | st.booleans(), min_size=3, max_size=3)),
    data=st.data(),
)
@ANY
def test_any_parquet(rows: list[list[Any]], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3))
    columns, types = {}, {str: pa.string(), float: pa.float64(), bool: pa.bool_(), int: pa.int64()}
    for number, cells in enumerate(zip(*rows, strict=True) if rows else [(), (), ()]):
        of_type = data.draw(st.sampled_from([*types]))
        present = [cell if type(cell) is of_type and (of_type is not int or abs(cell) < 2**63) else None for cell in cells]
        columns[f"c{number}"] = pa.array(present, types[of_type])
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=data.draw(st.integers(1, 5)))
    content = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    schema = schema_of({f"c{number}": kind for number, kind in enumerate(kinds)})
    with tempfile.TemporaryDirectory() as folder:
        verify_or_refuse(folder, schema, bytes(content), max_bad_rows=data.draw(st.sampled_from([0, 99])))
