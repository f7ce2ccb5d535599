"""Cells at the limits of their kinds, in every type that a format has: values, missing cells, and reasons for malformed ones."""

import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_logs import make, read, schema_of
from refusals import refuse

from data_pipeline.cells import parse_table
from data_pipeline.encoder import RequestEncoder
from data_pipeline.reference import hash_text
from data_pipeline.schema import Column, Kind, LogSchema
from data_pipeline.tables import json_types, parse_text
from data_pipeline.transform import TransformOptions, transform


def cells(array: pa.Array, missing: tuple[str, ...] = (), **column: Any) -> tuple[list[Any], list[str]]:
    """Read a column x; return the values of its well-formed rows, None where missing, and the reasons for the other rows."""
    schema = LogSchema(columns=(Column(name="x", **column),), missing=missing)
    parsed, _ = parse_table(pa.table({"x": array}), schema)
    if column["kind"] == "list":
        values = np.split(parsed.list_keys[0], parsed.list_ends[0])[:-1]
        return [value.tolist() for value in values], [reason for _, reason in parsed.reasons]
    special = {"label": parsed.labels, "weight": [parsed.weights], "time": [parsed.times]}
    values = special.get(column["kind"], parsed.integers if len(parsed.integers) else parsed.keys)[0]
    gaps = [*parsed.integer_missing, *parsed.key_missing, [False] * parsed.rows][0]
    return [None if gap else value for value, gap in zip(values.tolist(), gaps, strict=True)], [r for _, r in parsed.reasons]


@pytest.mark.parametrize(
    ("column", "array", "values", "bad"),
    [
        ({"kind": "label"}, pa.array([True, False, None]), [1, 0], [""]),
        ({"kind": "label"}, pa.array([1.0, 0.0, 0.5]), [1, 0], ["0.5"]),
        ({"kind": "integer"}, pa.array([1.0, None, 1.5, 2.0**31]), [1, None], ["1.5", "2147483648"]),
        ({"kind": "int64"}, pa.array([2**63 - 1, -(2**63)]), [2.0**63, -(2.0**63)], []),
        ({"kind": "int64"}, pa.array(["9223372036854775807", f"93{0:017}", "5.5"]), [2.0**63], [f"93{0:017}", "5.5"]),
        ({"kind": "float"}, pa.array([1.5, float("nan"), 1e39, float("inf")]), [1.5, None], ["1e+39", "inf"]),
        ({"kind": "float"}, pa.array([".5", "-2e3", "+1.", "inf", "nan", "1e999", "1,5", "0x1", "--1", "1e"]), [0.5, -2000, 1], 7),
        ({"kind": "weight"}, pa.array(["0", "2.5", "-1", "", "nan", "1e40"]), [0, 2.5], ["-1", "", "nan", "1e40"]),
        ({"kind": "hex"}, pa.array([-1, 0, 2**32 - 1, 2**32, None]), [0, 2**32 - 1, None], ["-1", "4294967296"]),
        ({"kind": "hex"}, pa.array([0.0, 7.0, 0.5, None]), [0, 7, None], ["0.5"]),
        ({"kind": "category"}, pa.array([7, None]), [hash_text(b"7"), None], []),
        ({"kind": "category"}, pa.array([True, False]), [hash_text(b"1"), hash_text(b"0")], []),
        ({"kind": "category"}, pa.array([7.0, None, 7.5]), [hash_text(b"7"), None], ["7.5"]),
        ({"kind": "category"}, pa.array([Decimal("15.000000000"), Decimal("7.5")]), [hash_text(b"15")], ["7.500000000"]),
        ({"kind": "list"}, pa.array([[Decimal("15.000000000")]]), [[hash_text(b"15")]], []),
        ({"kind": "category"}, pa.array([b"\xff", b""]), [hash_text(b"\xff"), None], []),
        ({"kind": "list"}, pa.array([[1], None, [None]]), [[hash_text(b"1")], []], ["null"]),
        ({"kind": "list"}, pa.array([[True], []]), [[hash_text(b"1")], []], []),
        ({"kind": "time"}, pa.array([5, None]), [5.0], [""]),
    ],
)  # fmt: skip
def test_values(column: dict[str, Any], array: pa.Array, values: list[Any], bad: list[str] | int) -> None:
    for typed in (array, array.dictionary_encode() if column["kind"] != "list" else array):
        actual, reasons = cells(typed, **column)
        assert actual == values
        if isinstance(bad, int):
            assert len(reasons) == bad
        else:
            assert [reason.split(" is not ")[0] for reason in reasons] == [f"x {cell!r}" for cell in bad]


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_texts_of_any_type_have_one_hash(values: list[bytes]) -> None:
    array = pa.array([b"before", *values, b"after"], pa.large_binary())[1:-1]
    for typed in (array, array.dictionary_encode(), array.cast(pa.binary()), array.cast(pa.binary_view())):
        assert cells(typed, kind="category") == ([hash_text(text) if text else None for text in values], [])
    identifier = uuid.UUID(int=5)
    assert cells(pa.array([identifier.bytes], pa.uuid()), kind="category")[0] == [hash_text(str(identifier).encode())]
    assert cells(pa.array([b"abcd"], pa.binary(4)), kind="category")[0] == [hash_text(b"abcd")]


@pytest.mark.parametrize("form", ["text", "csv", "jsonl", "parquet"])
def test_marks_of_missing_cells_are_empty_cells(tmp_path: Path, form: str) -> None:
    """In every format, in requests and in lookups."""
    kinds: dict[str, Kind] = {"y": "label", "x": "integer", "z": "float", "c": "category", "l": "list"}
    records = [["0", "1", "0.5", "a", "p|q"], ["1", "NA", "NaN", "NA", "NaN"], ["0", "", "", "", ""], ["1", "3", "NaN", "b", "r"]]
    rows = [dict(zip(kinds, record, strict=True)) for record in records]
    if form == "jsonl":
        (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "log", use_dictionary=["c"])
    else:
        (tmp_path / "log").write_text("".join(",".join(record) + "\n" for record in records))
    schema = schema_of(kinds, format="csv" if form == "parquet" else form, missing=("NA", "NaN"))
    make(tmp_path / "log", tmp_path / "data", schema=schema, min_count=1, val_fraction=0, test_fraction=0)
    written = read(tmp_path / "data")
    assert written["x"].tolist() == pytest.approx([np.log(2), 0, 0, np.log(4)])
    assert written["c"].tolist() in ([1, 0, 0, 2], [2, 0, 0, 1])
    assert written["l"].str.len().tolist() == [2, 0, 0, 1]
    if form == "jsonl":
        (tmp_path / "unlabeled").write_text(json.dumps(dict(list(rows[0].items())[1:])) + "\n")
        new = TransformOptions(inputs=(tmp_path / "unlabeled",), data=tmp_path / "data", output=tmp_path / "new")
        assert not transform(new).labels
    requests = [{"x": "NA", "z": "NaN", "c": "NA", "l": "NaN"}, {"x": None, "z": None, "c": "", "l": None}]
    flat = RequestEncoder(tmp_path / "data")(requests)
    assert not flat.dense.any()
    assert not flat.values.any()
    assert flat.lengths.tolist() == [1, 1, 0, 0]


def test_marks_of_missing_numbers(tmp_path: Path) -> None:
    """Numbers are compared with marks by their text."""
    (tmp_path / "log").write_text("0,-1,-1,-1\n1,5,0.5,-10\n")
    kinds: dict[str, Kind] = {"y": "label", "x": "integer", "z": "float", "c": "category"}
    schema = schema_of(kinds, format="csv", missing=("-1",))
    make(tmp_path / "log", tmp_path / "data", schema=schema, min_count=1, val_fraction=0, test_fraction=0)
    for rows in ([{"x": -1, "z": -1.0, "c": -1}], [{"x": None, "z": None, "c": None}]):
        assert not any(part.any() for part in RequestEncoder(tmp_path / "data")(rows)[:2])
    numbers = pa.array([-1, 5])
    for array in (numbers, pa.array([-1.0, 5.0]), numbers.dictionary_encode(), numbers.cast(pa.decimal128(21, 1))):
        assert cells(array, ("-1", "x"), kind="category")[0] == [None, hash_text(b"5")]
        assert cells(array, ("-1", "x"), kind="float")[0] == [None, 5]
    assert cells(pa.array([Decimal("-99.99"), Decimal("0.30")]), ("-99.99",), kind="float")[0] == [None, 0.3]
    for mark in ("-1", "-1.0", "-1e0"):
        assert cells(pa.array(["-1.0", "-1", "-1.5"]), (mark,), kind="float")[0] == [None, None, -1.5], "as pandas writes integers"


@pytest.mark.parametrize("kind", ["integer", "float", "hex"])
def test_types_that_cannot_be_read_and_unknown_marks_are_named(kind: str) -> None:
    refuse("x has type struct<a: int64>, which is not ", cells, pa.array([{"a": 1}]), kind=kind)
    _, reasons = cells(pa.array(["\\N"]), kind=kind)
    assert reasons[0].endswith(r'; if it stands for a missing value, set missing = ["\\N"] in the schema')


ZONES = {"": 0, "Z": 0, "UTC": 0, " UTC": 0, "+00:00": 0, "+02:00": 120, "-0530": -330, " -0530": -330, "+09": 540}


@given(
    moment=st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1)),
    zone=st.sampled_from(sorted(ZONES)),
    written=st.sampled_from(["%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S.%f000", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"]),
)
def test_times_as_programs_write_them(moment: datetime, zone: str, written: str) -> None:
    """ISO 8601 times, with zones and fractions as pandas, Spark and BigQuery write them."""
    zone = zone if written != "%Y-%m-%d" else "Z" if zone else ""
    known = datetime.fromisoformat(moment.strftime(written)).replace(tzinfo=UTC) - timedelta(minutes=ZONES[zone])
    times, _ = cells(pa.array([moment.strftime(written) + zone, "5"]), kind="time")
    assert times == pytest.approx([known.timestamp(), 5.0], abs=1e-5)


@pytest.mark.parametrize(
    "text",
    ["2026-01-01+02:00", "2026-01-01 10:00 CET", "2026-01-01 10:00+2", "2026-01-01 10:00+25:00", "10:00", "2026-02-30", "\xff"],
)
def test_texts_that_are_not_times(text: str) -> None:
    times, reasons = cells(pa.array([text, "2026-01-01 10:00+02:00"]), kind="time")
    assert len(times) == 1
    assert "is not a time in ISO 8601, nor a number" in reasons[0]


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_far_times_and_nanoseconds(unit: str) -> None:
    moments = [datetime(2260, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)]
    stamps = pa.array(moments, pa.timestamp("us", "UTC")).cast(pa.timestamp(unit, "UTC"))
    assert cells(stamps, kind="time")[0] == [moment.timestamp() for moment in moments]


SINGLE = schema_of({"a": "category", "n": "float", "l": "list"}, format="jsonl")
JSON = replace(SINGLE, columns=(*SINGLE.columns, Column(name="again", kind="category", column="a")))
FIRST = b'{"a": "x", "n": 1, "l": ["p"]}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": "\\ud83d\\ude00", "n": 1e5, "l": null, "more": [[[{}]]]}', None),
        (b'{"a": "\xff\\u0000", "n": NaN, "l": []} \r', None),
        (b' {"a" : "x", "n": 123456789012345678901234567890} ', None),
        (b'{"a": 7}', "a holds the type number where the log's first lines hold string"),
        (b'{"l": ["p", 7]}', "l holds the type number where the log's first lines hold string"),
        (b'{"l": "p"}', "l holds the type string where the log's first lines hold array"),
        (b'{"a": "x", "l": [null]}', "l 'null' is not a list of non-empty elements"),
        (b'{"a": "x", "n": Infinity}', "n 'inf' is not a finite number"),
        (b'{"a": "x", "a": "y"}', "it is not JSON (Column(/a) was specified twice)"),
        (b'{"a": "\\ud800"}', "it is not JSON (The surrogate pair in string is invalid)"),
        (b'{"a": "tab\there"}', "it is not JSON (Invalid encoding in string)"),
        (b'{"n": 01}', "it is not JSON (Missing a comma or '}' after an object member)"),
        (b'{"a": "x"}{"a": "y"}', "a value doesn't end on its line, or others follow it"),
        (b'{"a":', "it is not a JSON object"),
        (b"  ", "it is not a JSON object"),
        (b"\r", "blank line"),
        (b'{"a": "x", "l": ' + b"[" * 5000 + b"]" * 5000 + b"}", "l holds the type array where the log's first lines hold string"),
    ],
)
def test_lines_of_json(line: bytes, reason: str | None) -> None:
    """Among others, whatever the size of a block; the others keep their rows."""
    for before, after in ((1, 0), (1, 1), (3, 5)):
        text = FIRST * before + line + b"\n" + FIRST * after
        parsed = parse_text(text, JSON, json_types(FIRST, JSON))
        assert parsed.reasons == (((before, reason),) if reason else ())
        assert parsed.rows == before + after + (reason is None)
        good = [number for number in range(parsed.lines) if number != before or reason is None]
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 10) + 1
        assert parsed.starts.tolist() == np.append(0, ends)[good].tolist()


@pytest.mark.parametrize(
    ("first", "types"),
    [
        (b'{"n": 1}\n{"a": 7, "l": [1, 2]}\n', [pa.int64(), pa.float64(), pa.list_(pa.int64())]),
        (b'{"a": 18446744073709551615, "l": "p|q", "n": "1.5"}\n', [pa.uint64(), pa.binary(), pa.binary()]),
        (b'{"a": true, "l": [true], "n": false}\n{broken\n', [pa.bool_(), pa.bool_(), pa.list_(pa.bool_())]),
        (b'{"a": 7, "l": [[1]]}\n{"a": 7.5}\n', [pa.float64(), pa.float64(), pa.list_(pa.binary())]),
        (b'{"a": NaN, "n": NaN}\n{"a": "x"}\n', [pa.binary(), pa.float64(), pa.list_(pa.binary())]),
        (b"", [pa.binary(), pa.float64(), pa.list_(pa.binary())]),
    ],
)
def test_types_of_json(first: bytes, types: list[pa.DataType]) -> None:
    assert json_types(first, JSON).types == types


def test_other_types_of_json() -> None:
    """An ignored column doesn't decide a type, and numbers must have that of the first lines."""
    ignored = (Column(name="id", kind="ignore"), Column(name="user", kind="category", column="id"))
    assert json_types(b'{"id": 1152921504606847000}', replace(JSON, columns=ignored)).field("id").type == pa.int64()
    parsed = parse_text(b'{"a": 7}\n{"a": 7.0}\n', JSON, json_types(b'{"a": 7}\n', JSON))
    assert parsed.reasons == ((1, "7.0 is not of the type int64 of its column in the log's first lines"),)
    assert json_types(b'{"l": []}', JSON, lambda: b'{"a": 7, "l": [7]}').types == [pa.int64(), pa.float64(), pa.list_(pa.int64())]


@pytest.mark.parametrize(("quoted", "form"), [(b"a", "csv"), (b'"a"', "csv"), (b"a", "text")])
def test_a_byte_order_mark_is_not_a_part_of_the_first_value(quoted: bytes, form: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + quoted + b",0\na,1\n")
    schema = schema_of({"c": "category", "y": "label"}, format=form)
    manifest = make(tmp_path / "log", tmp_path / "data", schema=schema, val_fraction=0, test_fraction=0)
    assert manifest.categorical_columns[0].distinct == 1
