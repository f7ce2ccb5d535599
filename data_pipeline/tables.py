"""Parsing of formats beyond `data_pipeline.parse`, with Arrow: quoted CSV, named columns in any order, JSON lines, Parquet.

Each line is a row. A value that doesn't end on its line, such as a quoted text with a line break, is malformed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from data_pipeline.cells import is_list, to_parsed
from data_pipeline.json_lines import is_utf8, read_cells
from data_pipeline.parse import BLOCK_BYTES, REASONS_KEPT, Parsed, measure
from data_pipeline.schema import LogSchema

_ARRAYS_PER_TEXT = 8  # bytes of a block's arrays per byte of text: Arrow and the search for quotes hold several arrays
_COPIES = 4  # of a cell's bytes, between Parquet's array and the hashes
_NUMBER_BYTES = 8 + 1  # of a number or key and its missing flag
_KEY_BYTES = 8  # of a list's element
BOM = b"\xef\xbb\xbf"
_BROKEN_QUOTE = "a quoted value doesn't end on its line"
_RETURN = "a carriage return within the line"


def read_names(line: bytes, schema: LogSchema) -> tuple[str, ...]:
    """Parse the column names in a log's header line."""
    text = line.removeprefix(BOM).decode("utf-8", "replace").rstrip("\r\n")
    if schema.format == "text":
        return tuple(text.split(schema.separator))
    return tuple(next(csv.reader([text], delimiter=schema.separator), []))


def text_blocks(text: memoryview, schema: LogSchema, names: Sequence[str], *, block_bytes: int = BLOCK_BYTES) -> Iterator[Parsed]:
    """Parse whole lines in blocks, each of as many lines as arrays of `block_bytes` hold, but at least one.

    `starts` and the lines of `reasons` count from the text's beginning.

    Args:
        names: of the columns in the order of a line; JSON ignores them.
    """
    is_json = schema.format == "jsonl"
    begin = lines = 0
    while begin < len(text):
        window = bytes(text[begin : begin + block_bytes // _ARRAYS_PER_TEXT])
        end = window.rfind(b"\n") + 1
        if not end:  # one long line
            window = bytes(text[begin:])
            end = window.find(b"\n") + 1
        arrays = measure(np.frombuffer(window, np.uint8)[:end], schema, block_bytes, element_ends="," if is_json else "")
        block = window[: arrays.bytes]
        parsed = parse_json_lines(block, schema) if is_json else parse_delimited(block, schema, names)
        yield _shifted(parsed, begin, lines)
        begin, lines = begin + len(block), lines + parsed.lines


def table_blocks(table: pa.Table, schema: LogSchema, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Parsed]:
    """Parse rows of Parquet in blocks, as `text_blocks` does lines."""
    begin = 0
    for block in _split_table(table, len(schema.lists), block_bytes):
        yield _shifted(parse_table(block, schema), begin, begin)
        begin += len(block)


def _shifted(parsed: Parsed, begin: int, first_line: int) -> Parsed:
    """Shift the positions and lines of a parsed block to count from the beginning of the whole."""
    return replace(
        parsed, starts=parsed.starts + begin, reasons=tuple((first_line + line, reason) for line, reason in parsed.reasons)
    )


def _split_table(table: pa.Table, lists: int, block_bytes: int) -> Iterator[pa.Table]:
    """Halve a table recursively until the arrays made from each piece fit a block."""
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    cells = sum(chunk.nbytes - chunk[:0].nbytes for chunk in chunks)  # leaves out dictionaries, which slices share
    elements = max((len(chunk.flatten()) if is_list(chunk.type) else chunk.nbytes for chunk in chunks), default=0)
    arrays = _COPIES * cells + _NUMBER_BYTES * len(table) * table.num_columns + _KEY_BYTES * lists * elements
    if len(table) <= 1 or arrays <= block_bytes:
        yield table
        return
    middle = len(table) // 2
    yield from _split_table(table[:middle], lists, block_bytes)
    yield from _split_table(table[middle:], lists, block_bytes)


def parse_delimited(text: bytes, schema: LogSchema, names: Sequence[str]) -> Parsed:
    """Parse whole lines of separated values, quoted if the format is "csv", with columns in the order of `names`."""
    starts, ends, reasons = _lines(text)
    for line, reason in _misshapen(text, starts, ends, schema, len(names)):
        reasons.setdefault(line, reason)
    kept_lines = np.setdiff1d(np.arange(len(starts)), np.fromiter(reasons, np.int64, len(reasons)))
    kept = text if not reasons else b"".join(text[starts[line] : ends[line]] for line in kept_lines.tolist())
    used_columns = [column for column in schema.columns if column.kind != "ignore"]
    numbers = [str(number) for number in range(len(names))]  # ignored columns may share a name
    number_of = dict(zip(names, numbers, strict=True))
    uneven: dict[int, str] = {}

    def skip(row: pa_csv.InvalidRow) -> str:
        uneven[row.number - 1] = f"{row.actual_columns} columns where {row.expected_columns} are expected"
        return "skip"

    columns: dict[str, Any] = {column.name: pa.array([], pa.binary()) for column in used_columns}
    if kept:
        table = pa_csv.read_csv(
            io.BytesIO(kept),
            pa_csv.ReadOptions(column_names=numbers, use_threads=False, block_size=len(kept) + 1),
            pa_csv.ParseOptions(
                delimiter=schema.separator,
                quote_char='"' if schema.format == "csv" else False,
                newlines_in_values=False,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            pa_csv.ConvertOptions(
                column_types={number_of[column.source]: pa.binary() for column in used_columns},
                include_columns=sorted({number_of[column.source] for column in used_columns}),
                strings_can_be_null=False,
                null_values=[],
            ),
        )
        columns = {column.name: table.column(number_of[column.source]).combine_chunks() for column in used_columns}
    reasons |= {int(kept_lines[row]): reason for row, reason in uneven.items()}
    kept_lines = np.delete(kept_lines, np.fromiter(uneven, np.int64, len(uneven)))
    return _to_rows(columns, schema, starts, kept_lines, reasons)


def parse_json_lines(text: bytes, schema: LogSchema) -> Parsed:
    """Parse lines that are each a JSON object; absent names are missing values, and unknown names are ignored."""
    starts, ends, reasons = _lines(text)
    columns, kept_lines, malformed = read_cells(text, starts, ends, schema, leave_out=reasons.keys())
    return _to_rows(columns, schema, starts, kept_lines, reasons | malformed)


def parse_table(table: pa.Table, schema: LogSchema) -> Parsed:
    """Parse rows of Parquet; lines are row numbers."""
    columns = {}
    for column in schema.columns:
        if column.kind != "ignore":
            array = table.column(column.source).combine_chunks()
            columns[column.name] = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return to_parsed(columns, schema, rows=len(table))[0]


def _to_rows(columns: dict[str, Any], schema: LogSchema, starts: np.ndarray, lines: np.ndarray, reasons: dict[int, str]) -> Parsed:
    """Convert the cells of the given lines; `reasons` say why other lines are malformed, by line number."""
    parsed, good = to_parsed(columns, schema, rows=len(lines))
    reasons = reasons | {int(lines[row]): reason for row, reason in parsed.reasons}
    return replace(
        parsed,
        starts=starts[lines[good]],
        lines=len(starts),
        rejected=len(starts) - parsed.rows,
        reasons=tuple(sorted(reasons.items()))[:REASONS_KEPT],
    )


def _lines(text: bytes) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Return where lines begin and end, and the reasons to reject blank lines, by line number."""
    newlines = _positions(text, "\n")
    starts = np.append(0, newlines + 1)[:-1]
    short = np.flatnonzero(newlines - starts <= 1)
    return starts, newlines + 1, {int(line): "blank line" for line in short if text[starts[line] : newlines[line]] in (b"", b"\r")}


def _misshapen(text: bytes, starts: np.ndarray, ends: np.ndarray, schema: LogSchema, columns: int) -> Iterator[tuple[int, str]]:
    """Yield reasons for lines that Arrow would split, or that have the wrong number of columns."""
    if text.count(b"\r") != text.count(b"\r\n"):
        returns = _positions(text, "\r")
        lone = returns[np.frombuffer(text, np.uint8)[returns + 1] != ord("\n")]
        yield from ((line, _RETURN) for line in np.unique(np.searchsorted(starts, lone, side="right") - 1).tolist())
    quotes = _positions(text, '"') if schema.format == "csv" else np.empty(0, np.int64)
    quotes_per_line = np.searchsorted(quotes, ends) - np.searchsorted(quotes, starts)
    yield from ((line, _BROKEN_QUOTE) for line in np.flatnonzero(quotes_per_line % 2).tolist())
    separators = _positions(text, schema.separator)
    if len(quotes):
        closed = quotes[np.repeat(quotes_per_line % 2 == 0, quotes_per_line)]
        separators = separators[np.searchsorted(closed, separators) % 2 == 0]
    counts = 1 + np.searchsorted(separators, ends) - np.searchsorted(separators, starts)
    for line in np.flatnonzero(counts != columns).tolist():
        yield line, f"{counts[line]} columns where {columns} are expected"
    # Odd quoting can still change the number of columns, which Arrow reports only for lines in UTF-8.
    for line in np.flatnonzero(quotes_per_line).tolist() if not is_utf8(text) else ():
        if not is_utf8(text[starts[line] : ends[line]]):
            yield line, "quoted text is not UTF-8"


def _positions(text: bytes, character: str) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(text, np.uint8) == ord(character))
