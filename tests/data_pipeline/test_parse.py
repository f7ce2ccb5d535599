"""The fast parser agrees with the obvious one, cell by cell, on well-formed and adversarial lines."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import parts
from data_pipeline.parse import REASONS_KEPT, Parsed, parse
from data_pipeline.reference import Cell, Malformed, parse_line
from data_pipeline.schema import Column, LogSchema, criteo_schema, detect_criteo_schema
from data_pipeline.tables import text_blocks

CRITEO = criteo_schema(labeled=True)
OTHER = LogSchema(
    columns=(
        Column(name="id", kind="ignore"),
        Column(name="site", kind="category"),
        Column(name="click", kind="label"),
        Column(name="tags", kind="list"),
        Column(name="price", kind="integer"),
        Column(name="device", kind="hex"),
        Column(name="bought", kind="label"),
        Column(name="words", kind="list", separator=" "),
    ),
    separator=",",
)
ONE_COLUMN = LogSchema(columns=(Column(name="tags", kind="list"),))
GOOD = b"\t".join([b"1"] + [b""] * 39)


def cells_of(parsed: Parsed, schema: LogSchema, row: int) -> list[Cell]:
    """Convert a parsed row to the form of `parse_line`."""
    labels, integers, singles, lists = (iter(range(99)) for _ in range(4))
    cells: list[Cell] = []
    for column in schema.columns:
        match column.kind:
            case "ignore":
                cells.append(None)
            case "label":
                cells.append(int(parsed.labels[next(labels), row]))
            case "integer":
                i = next(integers)
                cells.append(None if parsed.integer_missing[i, row] else int(parsed.integers[i, row]))
            case "hex" | "category":
                i = next(singles)
                cells.append(None if parsed.key_missing[i, row] else int(parsed.keys[i, row]))
                assert cells[-1] is not None or parsed.keys[i, row] == 0
            case "list":
                i = next(lists)
                begin = parsed.list_ends[i, row - 1] if row else 0
                cells.append(parsed.list_keys[i][begin : parsed.list_ends[i, row]].tolist())
    return cells


def on_the_heap(text: bytes) -> np.ndarray:
    """Copy text without the zero byte that ends `bytes`, so that a sanitizer detects reads past the end."""
    return np.frombuffer(text, np.uint8).copy()


def assert_equals_reference(text: bytes, schema: LogSchema) -> None:
    expected, starts, rejected, start = [], [], [], 0
    for number, line in enumerate(text.split(b"\n")[:-1]):
        try:
            expected.append(parse_line(line, schema))
            starts.append(start)
        except Malformed as error:
            rejected.append((number, str(error)))
        start += len(line) + 1
    lines = text.count(b"\n")
    parsed = parse(on_the_heap(text), schema)
    assert [cells_of(parsed, schema, row) for row in range(parsed.rows)] == expected
    assert parsed.starts.tolist() == starts
    assert (parsed.lines, parsed.rejected, parsed.reasons) == (lines, len(rejected), tuple(rejected[:REASONS_KEPT]))
    blocks = list(text_blocks(text, schema, None, block_bytes=500))
    assert [cells_of(block, schema, row) for block in blocks for row in range(block.rows)] == expected
    assert [start for block in blocks for start in block.starts.tolist()] == starts
    assert (sum(block.lines for block in blocks), sum(block.rejected for block in blocks)) == (lines, len(rejected))
    assert [reason for block in blocks for reason in block.reasons] == rejected or len(rejected) > REASONS_KEPT


NUMBERS = st.one_of(
    st.text("0123456789abfABF-", max_size=12),
    st.sampled_from(["2147483647", "2147483648", "-2147483648", "-2147483649"]),
    st.sampled_from(
        ["1.0", "0.00", "-64.0", "2147483648.0", "1.", "-.0", ".0", "1.01", "1.0.0", "True", "false", "TRUE", "tRUE", "trueness"]
    ),
)
JUNK = st.text("01xX -+.,|\t\"'\r\\é\0", max_size=4)


CELLS = st.one_of(NUMBERS, JUNK, st.sampled_from(["a|b", "|", "a|", "|a", "a||b", "x y", "", "0", "1", "é|ü"]))


GOOD_ROWS = [["7", "x", "1", "a|b", "-5", "fF", "0", "x y z"], ["", "", "0", "", "", "", "1", ""]]
LINES = st.lists(st.lists(CELLS, min_size=7, max_size=9), max_size=4)


@settings(max_examples=300)
@given(lines=LINES, newline=st.sampled_from(["\n", "\r\n"]))
def test_lines_of_other_logs(lines: list[list[str]], newline: str) -> None:
    """Most of these lines are malformed; the good ones between them must keep their own list elements."""
    text = "".join(",".join(row) + newline for line in lines for row in (line, *GOOD_ROWS)).encode()
    assert parse(on_the_heap(text), OTHER).rows >= 2 * len(lines)
    assert_equals_reference(text, OTHER)


@settings(max_examples=200)
@given(text=st.binary(max_size=200))
def test_any_bytes(text: bytes) -> None:
    for schema in (CRITEO, OTHER, ONE_COLUMN):
        assert_equals_reference(text.replace(b"\x0b", b"\n") + b"\n", schema)


@pytest.mark.parametrize("kind", ["label", "integer", "hex"])
def test_every_byte_at_every_position(kind: str) -> None:
    """Cells of 1 to 9 bytes, which are read eight bytes at a time, in alternating good and malformed lines."""
    digits = b"-1234567" if kind == "integer" else b"1.000000" if kind == "label" else b"0aF9Af12"
    cells = [digits[:size] for size in range(9)] + [digits[:4] + digits]
    odd = [b"0x10", b"-", b"-0000000000002", b"9" * 40, b"123456789", b"01", b"1\r", *digits.split(b"4")]
    places = [(cell, place) for cell in cells for place in range(len(cell))]
    changed = [cell[:place] + bytes([byte]) + cell[place + 1 :] for cell, place in places for byte in range(256)]
    schema = LogSchema(columns=(Column(name="cell", kind=kind), Column(name="site", kind="category")))
    for end in (b"\tx\n", b"\tx\r\n"):
        assert_equals_reference(b"".join(cell + end for cell in cells + odd + changed), schema)
    last = replace(schema, columns=schema.columns[::-1])
    assert_equals_reference(b"".join(b"x\t" + cell + b"\n" for cell in cells + odd), last)


def test_text_without_an_end_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the sizes of the arrays don't fit each other"):
        parse(on_the_heap(GOOD), CRITEO)


def test_schema_by_majority() -> None:
    unlabeled = GOOD[2:]
    assert not detect_criteo_schema(b"\n".join([unlabeled, GOOD, unlabeled, b""])).labels
    assert detect_criteo_schema(b"\n".join([unlabeled, GOOD, GOOD, b""])).labels


def test_a_part_alone_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, positions = tmp_path / "log.txt", list[int]()
    log.write_bytes(b"0123456789abcde\n" * 1000)

    class Watched(io.FileIO):
        def seek(self, position: int, *whence: int) -> int:
            positions.append(position)
            return super().seek(position, *whence)

    monkeypatch.setattr(parts, "open_log", Watched)
    [part] = parts.read_parts(0, log, part_bytes=160, skip=(50).__ne__)
    assert (part.start, part.content) == (8000, log.read_bytes()[8000:8160])
    assert len(positions) <= 4
