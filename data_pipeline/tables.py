"""Parsing with Arrow of what `data_pipeline.parse` can't read: quoted CSV, columns in any order, JSON lines, Parquet.

Each line is a row. A value that doesn't end on its line, such as a quoted text with a line break, is malformed. Arrow refuses a
text as a whole, so a refused text is halved, down to the lines that are malformed.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from data_pipeline.cells import parse_table
from data_pipeline.parse import REASONS_KEPT, Parsed
from data_pipeline.schema import Column, LogSchema

Layout: TypeAlias = tuple[str, ...] | pa.Schema
"""Column names in the order of a line, or the types of JSON's columns by name."""

_PIECE_BYTES = 1 << 21  # of text; Arrow takes many times as much to read it
BOM = b"\xef\xbb\xbf"


def read_names(line: bytes, schema: LogSchema) -> tuple[str, ...]:
    """Parse the column names in a log's header line."""
    text = line.removeprefix(BOM).decode("utf-8", "replace").rstrip("\r\n")
    if schema.format == "text":
        return tuple(text.split(schema.separator))
    return tuple(next(csv.reader([text], delimiter=schema.separator), []))


def json_types(text: bytes, schema: LogSchema, more: Callable[[], bytes] = bytes) -> pa.Schema:
    """Detect the types of JSON's columns in a log's first lines, or in `more` of them for columns without values there.

    Later lines must have the same types.
    """
    columns = [column for column in schema.columns if column.kind != "ignore"]
    kinds = {column.source: column for column in reversed(columns)}
    values = _json_values(text, [column.source for column in columns])
    if rare := [name for name, seen in values.items() if not seen]:
        values |= _json_values(more(), rare)
    return pa.schema([(name, _json_type(seen, kinds[name])) for name, seen in values.items()])


def _json_values(text: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for line in text.removeprefix(BOM).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # reported when the line is parsed
            continue
        for name, values in seen.items():
            value = row.get(name) if isinstance(row, dict) else None
            is_empty = all(element is None for element in value) if isinstance(value, list) else value is None
            if not is_empty and value == value:  # NaN isn't
                values.append(value)
    return seen


def _json_type(values: list[Any], column: Column) -> pa.DataType:
    if column.kind == "list" and (not values or isinstance(values[0], list)):
        elements = [element for value in values if isinstance(value, list) for element in value if element is not None]
        return pa.list_(_json_type(elements, replace(column, kind="category")))
    types = {type(value) for value in values[:1]} | {type(value) for value in values if isinstance(value, float)}
    if types == {bool}:
        return pa.bool_()
    if not types <= {int, float} or (not types and column.kind in ("hex", "category", "list", "time")):
        return pa.binary()
    if column.kind in ("hex", "category", "list") and types == {int}:
        return pa.uint64() if any(type(value) is int and value >= 1 << 63 for value in values) else pa.int64()
    return pa.float64()


def parse_text(text: bytes, schema: LogSchema, layout: Layout) -> Parsed:
    """Parse whole lines of JSON, or of separated values, quoted if the format is "csv"."""
    data = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(data == ord("\n"))
    starts = np.append(0, newlines + 1)[:-1]
    stops = newlines - ((newlines > starts) & (data[newlines - 1] == ord("\r")))
    if isinstance(layout, pa.Schema):
        read, tables = _json_reader(layout), [layout.empty_table()]
        reasons = _misshapen_json(text, data, starts, stops)
    else:
        sources = sorted({column.source for column in schema.columns if column.kind != "ignore"})
        read, tables = _csv_reader(schema, layout, sources), [pa.schema([(name, pa.binary()) for name in sources]).empty_table()]
        reasons = _misshapen_csv(text, data, starts, newlines, schema, len(layout))
    reasons |= dict.fromkeys(np.flatnonzero(starts == stops).tolist(), "blank line")
    lines, kept = [np.empty(0, np.int64)], np.setdiff1d(np.arange(len(starts)), np.array([*reasons], np.int64))

    def text_of(some: np.ndarray) -> bytes:
        gaps = np.flatnonzero(np.diff(some) != 1)
        firsts, lasts = some[np.append(0, gaps + 1)], some[np.append(gaps, -1)]
        spans = zip(starts[firsts].tolist(), newlines[lasts].tolist(), strict=True)
        return b"".join(text[start : newline + 1] for start, newline in spans)

    for piece in np.array_split(kept, 1 + len(text) // _PIECE_BYTES):
        for read_lines, rows in _read_rows(read, text_of, piece):
            if isinstance(rows, str):
                reasons[int(read_lines[0])] = rows
            else:
                lines.append(read_lines)
                tables.append(rows)
    parsed, good = parse_table(pa.concat_tables(tables), schema)
    line_of_row = np.concatenate(lines)
    reasons |= {int(line_of_row[row]): reason for row, reason in parsed.reasons}
    return replace(
        parsed,
        starts=starts[line_of_row[good]],
        lines=len(starts),
        rejected=len(starts) - parsed.rows,
        reasons=tuple(sorted(reasons.items()))[:REASONS_KEPT],
    )


def _read_rows(
    read: Callable[[bytes], pa.Table], text_of: Callable[[np.ndarray], bytes], lines: np.ndarray
) -> Iterator[tuple[np.ndarray, pa.Table | str]]:
    """Yield lines with their rows, or a single malformed line with the reason."""
    if not len(lines):
        return
    try:
        table = read(text_of(lines))
        refused = "" if len(table) == len(lines) else "a value doesn't end on its line, or others follow it"
    except pa.ArrowException as error:
        refused = _reason(error)
    if not refused:
        yield lines, table
    elif len(lines) == 1:
        yield lines, refused
    else:
        for half in np.array_split(lines, 2):
            yield from _read_rows(read, text_of, half)


def _reason(error: pa.ArrowException) -> str:
    text = str(error).encode("unicode_escape").decode()
    if match := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return f"{match[2]} columns where {match[1]} are expected"
    if match := re.search(r"Column\(/(.+?)(?:/\[\])?\) changed from (\w+) to (\w+)", text):
        return f"{match[1]} holds the type {match[3]} where the log's first lines hold {match[2]}"
    if match := re.search(r"Failed to convert JSON to (\w+), couldn't parse:(.*)", text):
        return f"{match[2][:40]} is not of the type {match[1]} of its column in the log's first lines"
    return f"it is not JSON ({re.sub(r'JSON parse error: |[.]? in row [0-9]+', '', text)[:200]})"


def _json_reader(types: pa.Schema) -> Callable[[bytes], pa.Table]:
    parse = pa_json.ParseOptions(explicit_schema=types, unexpected_field_behavior="ignore")
    return lambda text: pa_json.read_json(io.BytesIO(text), pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1), parse)


def _csv_reader(schema: LogSchema, names: Sequence[str], sources: Sequence[str]) -> Callable[[bytes], pa.Table]:
    """Return a reader of the columns named `sources`, as bytes."""
    numbers = [str(number) for number in range(len(names))]  # ignored columns may share a name
    number_of = dict(zip(names, numbers, strict=True))
    used = [number_of[source] for source in sources]
    quote = '"' if schema.format == "csv" else False
    parse = pa_csv.ParseOptions(delimiter=schema.separator, quote_char=quote, ignore_empty_lines=False)
    convert = pa_csv.ConvertOptions(column_types=dict.fromkeys(used, pa.binary()), include_columns=used, null_values=[])

    def read(text: bytes) -> pa.Table:
        text = BOM + text if text.startswith(BOM) else text  # Arrow drops one, wherever in the log this text begins
        options = pa_csv.ReadOptions(column_names=numbers, use_threads=False, block_size=len(text) + 1)
        rows = pa_csv.read_csv(io.BytesIO(text), options, parse, convert).rename_columns(list(sources))
        is_open = len(rows) and any(column[-1].as_py().endswith(b"\n") for column in rows.columns)  # within quotes
        return rows.slice(0, len(rows) - 1) if is_open else rows

    return read


def _misshapen_json(text: bytes, data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> dict[int, str]:
    """Return reasons for lines that Arrow would join with others, or skip."""
    suspects = np.flatnonzero((data[starts] != ord("{")) | (data[stops - 1] != ord("}"))).tolist()
    stripped = {line: text[starts[line] : stops[line]].strip() for line in suspects}
    return {line: "it is not a JSON object" for line, row in stripped.items() if not (row.startswith(b"{") and row.endswith(b"}"))}


def _misshapen_csv(
    text: bytes, data: np.ndarray, starts: np.ndarray, newlines: np.ndarray, schema: LogSchema, columns: int
) -> dict[int, str]:
    """Return reasons for lines that Arrow would divide or join with others, and for most lines of a wrong number of columns."""

    def count(character: str) -> np.ndarray:
        positions = np.flatnonzero(data == ord(character))
        return np.searchsorted(positions, newlines) - np.searchsorted(positions, starts)

    reasons, quotes = {}, count('"') if schema.format == "csv" and b'"' in text else np.zeros(len(starts), np.int64)
    if text.count(schema.separator.encode()) != (columns - 1) * len(starts):
        counts = 1 + count(schema.separator)
        uneven = np.flatnonzero((counts != columns) & (quotes == 0)).tolist()
        reasons = {line: f"{counts[line]} columns where {columns} are expected" for line in uneven}
    if b'\\"' in text and quotes.any() and schema.separator != "\\":  # Arrow would end the value there, and go on with it
        escaped = re.finditer(rb'\\"(?=[^"\r\n%s])' % re.escape(schema.separator.encode()), text)
        lines = np.searchsorted(newlines, [match.start() for match in escaped]).tolist()
        reasons |= dict.fromkeys(lines, 'a quote follows a backslash; write "" for a quote within quotes')
    reasons |= dict.fromkeys(np.flatnonzero(quotes % 2).tolist(), "a quoted value doesn't end on its line")
    if text.count(b"\r") != text.count(b"\r\n"):
        returns = np.flatnonzero(data == ord("\r"))
        lone = returns[data[returns + 1] != ord("\n")]
        reasons |= dict.fromkeys(np.searchsorted(newlines, lone).tolist(), "a carriage return within the line")
    return reasons
