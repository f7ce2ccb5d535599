"""Lines of JSON to cells: most of them by `csrc/json.cpp`, the others by the standard library, which is also the definition.

Not by Arrow, which guesses a column's type from all of a block: whether 7 or "2026-01-01" is text would depend on the lines
around it. Numbers keep their digits.

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
Cells = dict[str, pa.Array]  # by name: texts, empty ones where a value is missing, or lists of them


def read_cells(
    text: bytes, starts: np.ndarray, ends: np.ndarray, schema: LogSchema, *, leave_out: Collection[int] = ()
) -> tuple[Cells, np.ndarray, dict[int, str]]:
    """Read the cells of all columns but ignored ones.

    Args:
        text: whole lines.
        starts, ends: of the lines, int64 [n].
        schema: of the log.
        leave_out: lines that are not objects.

    Returns:
        The cells, the numbers of the lines that they are of, and why other lines are malformed, by number.
    """
    first = {column.source: number for number, column in reversed([*enumerate(schema.columns)])}
    columns = sorted((column for column in schema.columns if column.kind != "ignore"), key=lambda column: first[column.source])
    cells, is_parsed = _read_most(text, len(starts), columns)
    left = [line for line in np.flatnonzero(~is_parsed).tolist() if line not in leave_out]
    if not left:
        return cells, np.flatnonzero(is_parsed), {}
    others, given, reasons = read_by_definition(text, [(line, starts[line], ends[line]) for line in left], columns)
    lines = np.concatenate([np.flatnonzero(is_parsed), given])
    order = pa.array(np.argsort(lines))
    return {name: pa.concat_arrays([cells[name], others[name]]).take(order) for name in cells}, np.sort(lines), reasons


def read_by_definition(
    text: bytes, lines: Sequence[tuple[int, int, int]], columns: Sequence[Column]
) -> tuple[Cells, np.ndarray, dict[int, str]]:
    """`read_cells` of lines given by their numbers, beginnings and ends."""
    rows: list[list[Any]] = []
    given, reasons = [], {}
    for line, start, end in lines:
        try:
            row = json.loads(text[start:end], parse_int=str, parse_float=str, parse_constant=str)
            if not isinstance(row, dict):
                raise TypeError("it is JSON, but no object")
            rows.append([_cell(row.get(column.source), column) for column in columns])
            given.append(line)
        except (ValueError, RecursionError) as error:
            reasons[line] = f"it is no JSON object ({str(error).partition(':')[0]})"
        except TypeError as error:
            reasons[line] = str(error)
    cells = {
        column.name: pa.array([row[number] for row in rows], _LIST if column.kind == "list" else _TEXT)
        for number, column in enumerate(columns)
    }
    return cells, np.array(given, np.int64), reasons


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
    raise TypeError("a value is an object or a list, where text or a number is due")


def _read_most(text: bytes, lines: int, columns: Sequence[Column]) -> tuple[Cells, np.ndarray]:
    """The cells of lines without surprises, and which lines these are, bool [n]."""
    names = [np.frombuffer(column.source.encode(), np.uint8) for column in columns]
    marks = {","} | {column.separator for column in columns}  # between elements
    elements = lines + sum(map(text.count, map(str.encode, marks))) if any(column.kind == "list" for column in columns) else 0
    wanted = (
        np.concatenate([np.empty(0, np.uint8), *names]),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        np.array([column.kind == "list" for column in columns], np.bool_),
        np.array([ord(column.separator) for column in columns], np.uint8),
    )
    data = _sparsely_filled(len(columns) * len(text)).reshape(len(columns), len(text))
    ends = np.empty((len(columns), lines), np.int64)
    element_ends = np.empty((len(columns), elements), np.int64)
    is_parsed = np.empty(lines, np.bool_)
    schema = native.JsonSchema(*(Array(array, array.dtype) for array in wanted))
    cells = native.JsonCells(*(Array(array, array.dtype) for array in (data, ends, element_ends, is_parsed)))
    whole = Array(np.frombuffer(text, np.uint8), np.uint8)
    rows = native.parse_json(whole, ctypes.byref(schema), ctypes.byref(cells), is_utf8(text))
    arrays = {}
    for number, column in enumerate(columns):
        of_column = (data[number], ends[number, :rows])
        is_list = column.kind == "list"
        arrays[column.name] = _lists(*of_column, element_ends[number]) if is_list else _texts(*of_column)
    return arrays, is_parsed


def _sparsely_filled(size: int) -> np.ndarray:
    """Bytes of which few are written, in small pages: NumPy's own would be huge ones, each zeroed whole at its first byte."""
    pages = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size]


def _texts(data: np.ndarray, ends: np.ndarray) -> pa.Array:
    """Texts that end in `data` at `ends`."""
    offsets = np.append(0, ends)
    return pa.Array.from_buffers(_TEXT, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data[: offsets[-1]])])


def _lists(data: np.ndarray, ends: np.ndarray, element_ends: np.ndarray) -> pa.Array:
    """Lists that end at the elements `ends`."""
    offsets = np.append(0, ends)
    return pa.LargeListArray.from_arrays(to_arrow(offsets), _texts(data, element_ends[: offsets[-1]]))


def is_utf8(text: bytes) -> bool:
    """Whether all of a text is UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
