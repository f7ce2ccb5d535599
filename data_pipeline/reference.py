"""Python definitions of what the loops of `csrc` compute: parsed lines and reasons to reject them, and hashed ids.

A well-formed line has one cell for each column: a label of 0, 1, false or true; 32-bit integers or empty; categories of 1 to 8 hex
digits (upper or lower case) or empty; any text or none for hashed categories; lists of non-empty elements, or empty. Labels and
integers may have a fraction of zeros, as pandas writes them in columns with missing values.
"""

import json
import re

from data_pipeline.schema import Column, LogSchema

_INTEGER = re.compile(rb"(-?0*[0-9]{1,10})(\.0+)?")
_BOOLEANS = {b"false": 0, b"False": 0, b"FALSE": 0, b"true": 1, b"True": 1, b"TRUE": 1}
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")

EXPECTED = {
    "label": "0 or 1",
    "integer": "a 32-bit integer",
    "int64": "a 64-bit integer",
    "float": "a finite number",
    "hex": "1 to 8 hex digits",
    "category": "text or an integer",
    "list": "a list of non-empty elements",
    "weight": "a finite number of at least 0",
    "time": "a time in ISO 8601, nor a number",
}
_MISSING = {b"na", b"nan", b"n/a", b"null", b"none", b"\\n"}  # as R, pandas, JSON, Python and MySQL write them

Cell = int | list[int] | None


class Malformed(ValueError):
    """A line is malformed; the message says why."""


def parse_line(line: bytes, schema: LogSchema) -> list[Cell]:
    """Parse a line without its newline into cells in the schema's order; None for missing values and ignored columns.

    Raises:
        Malformed: the line is not well-formed.
    """
    line = line.removesuffix(b"\r")
    if not line:
        raise Malformed("blank line")
    cells = line.split(schema.separator.encode())
    if len(cells) != len(schema.columns):
        raise Malformed(f"{len(cells)} columns where {len(schema.columns)} are expected")
    return [_parse_cell(cell, column) for column, cell in zip(schema.columns, cells, strict=True)]


def _parse_cell(cell: bytes, column: Column) -> Cell:
    match column.kind:
        case "label":
            return _BOOLEANS[cell] if cell in _BOOLEANS else _integer(cell, 0, 1, column)
        case "integer":
            return _integer(cell, -(2**31), 2**31 - 1, column) if cell else None
        case "hex":
            if cell and not _HEX.fullmatch(cell):
                raise Malformed(mismatch(cell, column))
            return int(cell, 16) if cell else None
        case "category":
            return hash_text(cell) if cell else None
        case "list":
            elements = cell.split(column.separator.encode()) if cell else []
            if not all(elements):
                raise Malformed(mismatch(cell, column))
            return [hash_text(element) for element in elements]
        case "ignore":
            return None
        case _:
            raise AssertionError(f"columns of kind {column.kind} are not parsed by line")


def _integer(cell: bytes, low: int, high: int, column: Column) -> int:
    matched = _INTEGER.fullmatch(cell)
    if not matched or not low <= int(matched[1]) <= high:
        raise Malformed(mismatch(cell, column))
    return int(matched[1])


def mismatch(cell: bytes, column: Column) -> str:
    """Say what a cell is not, and how a schema can allow it."""
    hint = ""
    if column.kind in ("integer", "int64", "float", "hex") and cell.lower() in _MISSING:
        hint = f"; if it stands for a missing value, set missing = [{json.dumps(cell.decode())}] in the schema"
    quoted = repr(cell[:40])[1:]  # escapes what isn't printable ASCII, so that the message is one line
    return f"{column.name} {quoted} is not {EXPECTED[column.kind]}{hint}"


def hash_text(text: bytes) -> int:
    """Hash with 64-bit FNV-1a (Fowler, Noll, Vo) and splitmix64's finalizer; n texts collide with probability n^2 / 2^65."""
    x = 0xCBF29CE484222325
    for byte in text:
        x = (x ^ byte) * 0x100000001B3 % 2**64
    return _mix(x)


def hashed_id(key: int, buckets: int) -> int:
    """Return an id in 1..buckets - 1 from splitmix64's next output for the state `key` (Steele, Lea, Flood, OOPSLA 2014)."""
    return 1 + ((_mix((key + 0x9E3779B97F4A7C15) % 2**64) >> 32) * (buckets - 1) >> 32)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
