"""The compiled reader of JSON lines agrees with the standard library, line by line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.json_lines import read_by_definition, read_cells
from data_pipeline.schema import Column, LogSchema
from data_pipeline.tables import parse_json_lines

SCHEMA = LogSchema(
    columns=(
        Column(name="a", kind="category"),
        Column(name="b", kind="list", separator="|"),
        Column(name="größe", kind="category"),
        Column(name="again", kind="user", column="a"),
        Column(name="other", kind="ignore"),
    ),
    format="jsonl",
)
SURPRISES = [
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": {}}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\ud83d\\ude00"}',
    b'{"a": 01}',
    b'{"a": 1.}',
    b'{"a": -}',
    b'{"a": 1e5, "b": 1E+05}',
    b'{"b": [null]}',
    b'{"b": [[]]}',
    b'{"b": "x||y"}',
    b'{"b": "|"}',
    b'{"b": ""}',
    b'{"b": true}',
    b'{"a": "x", "a": "y"}',
    b'{"a": [1], "a": 2}',
    b'{"a": "x" "b": 1}',
    b'{"a": "x",}',
    b"{}",
    b"[]",
    b"7",
    b'{"a": "x"} {',
    b' {"a" : "x" } \r',
    b'{"a": "\xff"}',
    b'{"x": "\xff"}',
    b"\xef\xbb\xbf{}",
    b'{"x": ' + b"[" * 40 + b"]" * 40 + b"}",
    b'{"a": "\\x"}',
    b'{"a": "\\u12"}',
    b'{"a": "tab\there"}',
    b'{"a": "\x7f\x00"}',
    b'{"gr\\u00f6\\u00dfe": "x"}',
    b'{"a": tru}',
    b'{"x": nul}',
    b'{"a": "',
    b'{"a": "\\',
    b'{"b": [1,',
    b"{",
    b'{"b": ["\\u002c", "\\u007c", "a|b"]}',
    b'{"a": 1e}',
    b'{"a": "\\ud83d\\u0041"}',
    b'{"a": "\\ud83dx"}',
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["a|b", "|", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "größe", "other", "more"]), VALUES, max_size=5)
LINES = st.builds(lambda row, ascii: json.dumps(row, ensure_ascii=ascii).encode("utf-8", "surrogatepass"), OBJECTS, st.booleans())


def assert_equals_definition(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    ends = np.cumsum([len(line) + 1 for line in lines])
    starts = np.append(0, ends)[:-1]
    columns = [column for column in SCHEMA.columns if column.kind != "ignore"]
    cells, given, reasons = read_cells(text, starts, ends, SCHEMA)
    expected = read_by_definition(text, list(zip(range(len(lines)), starts.tolist(), ends.tolist(), strict=True)), columns)
    assert reasons == expected[2]
    assert given.tolist() == expected[1].tolist()
    for name, array in expected[0].items():
        cells[name].validate(full=True)
        assert cells[name].to_pylist() == array.to_pylist(), name


@pytest.mark.parametrize("line", SURPRISES)
def test_surprises(line: bytes) -> None:
    assert_equals_definition([b'{"a": "before", "b": ["x"]}', line, b'{"a": "after", "b": "y"}'])


def test_surprises_among_others() -> None:
    assert_equals_definition(SURPRISES * 3)


@given(lines=st.lists(LINES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_objects(lines: list[bytes]) -> None:
    assert_equals_definition(lines)


@given(
    line=LINES,
    changed=st.lists(st.tuples(st.integers(0, 80), st.sampled_from(b'{}[]":,\\ue1-. \x00\xc3t|\r')), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_broken_objects(line: bytes, changed: list[tuple[int, int]]) -> None:
    broken = bytearray(line)
    for position, byte in changed:
        broken[position % len(broken)] = byte
    assert_equals_definition([line, bytes(broken), line])


def test_most_lines_are_read_by_the_compiled_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the slow reader is called")

    monkeypatch.setattr("data_pipeline.json_lines.read_by_definition", refuse)
    row = {"a": 'größe "x" \\ \t 😀', "b": ["1", 2, 3.5, True], "größe": -1.5e-7, "other": {"deep": [{"x": None}]}}
    lines = [json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for ascii in (True, False)]
    parsed = parse_json_lines(b"".join(lines), SCHEMA)
    assert (parsed.rows, parsed.rejected, parsed.list_ends.tolist()) == (2, 0, [[4, 8]])
    assert (parsed.keys[:, 0] == parsed.keys[:, 1]).all()
