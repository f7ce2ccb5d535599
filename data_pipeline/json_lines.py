"""Conversion of JSON lines to cells: `csrc/json.cpp` parses most lines, and the standard library, the reference, parses the rest.

Arrow is not used because it infers a column's type from a whole block, so whether 7 or "2026-01-01" is text would depend on
neighboring lines. Numbers keep their digits.

Letters: C columns, n lines.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline import native
from data_pipeline.arrow import to_arrow
from data_pipeline.native import Array
from data_pipeline.schema import Column, LogSchema

_TEXT, _LIST = pa.large_binary(), pa.large_list(pa.large_binary())
Cells = dict[str, pa.Array]  # by name: texts, empty where missing, or lists of texts


def read_cells(
    text: bytes, starts: np.ndarray, ends: np.ndarray, schema: LogSchema, *, leave_out: Collection[int] = ()
) -> tuple[Cells, np.ndarray, dict[int, str]]:
    """Read the cells of all columns except ignored ones.

    Args:
        starts, ends: of the lines, int64 [n].
        leave_out: numbers of lines to skip.

    Returns:
        The cells, the line number of each row, and the reasons why lines are malformed, by line number.
    """
    first = {column.source: number for number, column in reversed([*enumerate(schema.columns)])}
    columns = sorted((column for column in schema.columns if column.kind != "ignore"), key=lambda column: first[column.source])
    cells, is_parsed = _read_compiled(text, len(starts), columns)
    remaining = [line for line in np.flatnonzero(~is_parsed).tolist() if line not in leave_out]
    if not remaining:
        return cells, np.flatnonzero(is_parsed), {}
    others, other_lines, reasons = read_by_definition(text, [(line, starts[line], ends[line]) for line in remaining], columns)
    lines = np.concatenate([np.flatnonzero(is_parsed), other_lines])
    order = pa.array(np.argsort(lines))
    return {name: pa.concat_arrays([cells[name], others[name]]).take(order) for name in cells}, np.sort(lines), reasons


def read_by_definition(
    text: bytes, lines: Sequence[tuple[int, int, int]], columns: Sequence[Column]
) -> tuple[Cells, np.ndarray, dict[int, str]]:
    """Do what `read_cells` does, in Python, for lines given as (number, start, end)."""
    rows: list[list[Any]] = []
    parsed_lines, reasons = [], {}
    for line, start, end in lines:
        try:
            row = json.loads(text[start:end], parse_int=str, parse_float=str, parse_constant=str)
            if not isinstance(row, dict):
                raise TypeError("it is JSON but not an object")
            rows.append([_cell(row.get(column.source), column) for column in columns])
            parsed_lines.append(line)
        except (ValueError, RecursionError) as error:
            reasons[line] = f"it is not a JSON object ({str(error).partition(':')[0]})"
        except TypeError as error:
            reasons[line] = str(error)
    cells = {
        column.name: pa.array([row[number] for row in rows], _LIST if column.kind == "list" else _TEXT)
        for number, column in enumerate(columns)
    }
    return cells, np.array(parsed_lines, np.int64), reasons


def _cell(value: Any, column: Column) -> bytes | list[bytes]:
    if column.kind != "list":
        return _scalar(value)
    if isinstance(value, list):
        return [_scalar(element) for element in value]
    text = _scalar(value)
    return list(text.split(column.separator.encode())) if text else []


def _scalar(value: Any) -> bytes:
    match value:
        case None:
            return b""
        case str():
            return value.encode("utf-8", "surrogatepass")
        case bool():
            return b"1" if value else b"0"
    raise TypeError("a value is an object or a list instead of text or a number")


def _read_compiled(text: bytes, lines: int, columns: Sequence[Column]) -> tuple[Cells, np.ndarray]:
    """Parse common lines with the compiled parser; return their cells, and which lines it parsed, bool [n]."""
    names = [np.frombuffer(column.source.encode(), np.uint8) for column in columns]
    separators = {","} | {column.separator for column in columns}  # of elements
    elements = lines + sum(map(text.count, map(str.encode, separators))) if any(column.kind == "list" for column in columns) else 0
    schema_arrays = (
        np.concatenate([np.empty(0, np.uint8), *names]),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        np.array([column.kind == "list" for column in columns], np.bool_),
        np.array([ord(column.separator) for column in columns], np.uint8),
    )
    data = _sparsely_filled(len(columns) * len(text)).reshape(len(columns), len(text))
    ends = np.empty((len(columns), lines), np.int64)
    element_ends = np.empty((len(columns), elements), np.int64)
    is_parsed = np.empty(lines, np.bool_)
    schema = native.JsonSchema(*(Array(array, array.dtype) for array in schema_arrays))
    cells = native.JsonCells(*(Array(array, array.dtype) for array in (data, ends, element_ends, is_parsed)))
    whole = Array(np.frombuffer(text, np.uint8), np.uint8)
    rows = native.parse_json(whole, ctypes.byref(schema), ctypes.byref(cells), is_utf8(text))
    arrays = {}
    for number, column in enumerate(columns):
        column_data = (data[number], ends[number, :rows])
        is_list = column.kind == "list"
        arrays[column.name] = _lists(*column_data, element_ends[number]) if is_list else _texts(*column_data)
    return arrays, is_parsed


def _sparsely_filled(size: int) -> np.ndarray:
    """Allocate bytes of which few are written, in small pages; NumPy would use huge pages, zeroed whole at the first write."""
    pages = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size]


def _texts(data: np.ndarray, ends: np.ndarray) -> pa.Array:
    """Make texts that end in `data` at `ends`."""
    offsets = np.append(0, ends)
    return pa.Array.from_buffers(_TEXT, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data[: offsets[-1]])])


def _lists(data: np.ndarray, ends: np.ndarray, element_ends: np.ndarray) -> pa.Array:
    """Make lists that end at the elements `ends`."""
    offsets = np.append(0, ends)
    return pa.LargeListArray.from_arrays(to_arrow(offsets), _texts(data, element_ends[: offsets[-1]]))


def is_utf8(text: bytes) -> bool:
    """Whether a text is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
