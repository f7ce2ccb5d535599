"""A cell is accepted by the same rule whether its chunk is parsed at once or sifted line by line."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.parse import detect_schema, parse_chunk

GOOD = "\t".join(["1"] + [""] * 39)
SCHEMA = detect_schema(GOOD.encode())
CELLS = st.one_of(st.text("0123456789abfABF-", max_size=12), st.text("01xX -+.\"'\r\\é\0", max_size=4))


def expected_value(name: str, cell: str) -> int | None:
    """The value of a cell; raises ValueError where it must be rejected."""
    if name.startswith("C"):
        if cell and not re.fullmatch("[0-9a-fA-F]{1,8}", cell):
            raise ValueError
        return int(cell, 16) if cell else None
    if cell == "" and name.startswith("I"):
        return None
    if not re.fullmatch("-?[0-9]+", cell):
        raise ValueError
    value = int(cell)
    low, high = (0, 1) if name == "label" else (-(2**31), 2**31 - 1)
    if not low <= value <= high:
        raise ValueError
    return value


@settings(max_examples=300, deadline=None)
@given(position=st.sampled_from([0, 1, 13, 14, 39]), cell=CELLS, sifted=st.booleans())
@example(position=1, cell="0x10", sifted=False)
@example(position=1, cell=" 5", sifted=False)
@example(position=1, cell="-", sifted=False)
@example(position=1, cell="2147483648", sifted=False)
@example(position=1, cell="-0000000000002", sifted=False)
@example(position=1, cell="-0000000000002", sifted=True)
@example(position=14, cell="123456789", sifted=False)
@example(position=14, cell="0x1", sifted=False)
@example(position=14, cell='"1"', sifted=False)
@example(position=0, cell="", sifted=False)
@example(position=39, cell="\r", sifted=False)
def test_cell(position: int, cell: str, sifted: bool) -> None:
    name = SCHEMA.names[position]
    cells = GOOD.split("\t")
    cells[position] = cell
    lines = [GOOD, "\t".join(cells), GOOD] + (["damaged"] if sifted else [])
    parsed = parse_chunk("".join(line + "\n" for line in lines).encode(), SCHEMA)
    assert parsed.lines == len(lines)
    # A carriage return before the newline belongs to the line's end.
    cell = cell.removesuffix("\r") if position == 39 else cell
    try:
        value = expected_value(name, cell)
    except ValueError:
        (number, reason), *others = parsed.rejected
        assert number == 1
        assert reason.startswith(f"{name} '")
        assert parsed.batch.num_rows == 2
    else:
        others = list(parsed.rejected)
        assert parsed.batch.column(name).to_pylist() == [1 if position == 0 else None, value, 1 if position == 0 else None]
    assert others == ([(3, "1 columns where 40 are expected")] if sifted else [])


@pytest.mark.parametrize(("text", "reason"), [(b"\n", "blank line"), (b"\t\n", "2 columns where 40 are expected")])
def test_short_lines(text: bytes, reason: str) -> None:
    parsed = parse_chunk(text, SCHEMA)
    assert (parsed.batch.num_rows, parsed.lines, parsed.rejected) == (0, 1, ((0, reason),))


def test_schema_by_majority() -> None:
    unlabelled = GOOD[2:]
    assert detect_schema(f"{unlabelled}\n{GOOD}\n{unlabelled}\n".encode()).names[0] == "I1"
    assert detect_schema(f"{unlabelled}\n{GOOD}\n{GOOD}\n".encode()).field(0) == pa.field("label", pa.int8())
