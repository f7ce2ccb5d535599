"""Criteo text to Arrow columns: label int8, I* int32, C* uint32, a missing cell null.

A well-formed line has one value for each column, separated by tabs: a label of 0 or 1, counts that are 32-bit integers or empty,
categories of 1 to 8 hex digits (upper or lower case) or empty. Arrow's CSV reader parses a chunk of lines at once. It says
"invalid" for a whole chunk only, so a chunk that it refuses is sifted line by line, and what is left is parsed again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from data_pipeline.columns import CATEGORIES, INTEGERS, LABEL

_UNLABELLED = len(INTEGERS) + len(CATEGORIES)
# Arrow's integer parser also takes blanks and 0x; text with any byte but these is sifted by the stricter rules below.
_ALPHABET = b"0123456789abcdefABCDEF-\t\n"
_INTEGER = re.compile(rb"(-?)0*([0-9]{1,10})")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")


@dataclass(frozen=True, kw_only=True)
class ParsedChunk:
    """The well-formed lines of a chunk as columns; the others as (line within the chunk from 0, reason)."""

    batch: pa.RecordBatch
    lines: int
    rejected: tuple[tuple[int, str], ...]


def detect_schema(text: bytes) -> pa.Schema:
    """Columns of a log with or without label, by the number of columns of most of its first lines.

    Raises:
        ValueError: no line has 40 or 39 columns.
    """
    counts = Counter(line.count(b"\t") + 1 for line in text.split(b"\n", 100)[:100])
    labelled, unlabelled = counts[_UNLABELLED + 1], counts[_UNLABELLED]
    if not labelled and not unlabelled:
        found = counts.most_common(1)[0][0]
        raise ValueError(f"{found} columns; Criteo logs have 40 (label, I1..I13, C1..C26), or 39 without label, separated by tabs")
    fields = [(LABEL, pa.int8())] if labelled >= unlabelled else []
    return pa.schema(fields + [(name, pa.int32()) for name in INTEGERS] + [(name, pa.uint32()) for name in CATEGORIES])


def parse_chunk(text: bytes, schema: pa.Schema) -> ParsedChunk:
    """Parse whole lines, each ended by a newline (\\n or \\r\\n)."""
    text = text.replace(b"\r\n", b"\n")
    rejected: list[tuple[int, str]] = []
    try:
        batch = _parse_strictly(text, schema)
    except pa.ArrowInvalid:
        good, rejected = _sift(text, schema)
        batch = _parse_strictly(good, schema) if good else pa.RecordBatch.from_pylist([], schema)
    lines = text.count(b"\n")
    assert batch.num_rows + len(rejected) == lines, "every line is a row or rejected"
    return ParsedChunk(batch=batch, lines=lines, rejected=tuple(rejected))


def _parse_strictly(text: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Parse well-formed lines; raise ArrowInvalid if any is not."""
    if text.translate(None, _ALPHABET):
        raise pa.ArrowInvalid("a byte that belongs in no column")
    table = pa.csv.read_csv(
        pa.BufferReader(text),
        # One block and one thread: chunks are parsed side by side already, and a block must not end within a line.
        read_options=pa.csv.ReadOptions(column_names=schema.names, use_threads=False, block_size=len(text) + 1),
        parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False),
        convert_options=pa.csv.ConvertOptions(
            column_types={field.name: pa.string() if field.name in CATEGORIES else field.type for field in schema},
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )
    if LABEL in schema.names:
        label = table.column(LABEL)
        if label.null_count or not set(pc.unique(label).to_pylist()) <= {0, 1}:
            raise pa.ArrowInvalid("a label that is not 0 or 1")
    columns = [_from_hex(table.column(name)) if name in CATEGORIES else table.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in columns], schema=schema)


def _from_hex(digits: pa.ChunkedArray) -> pa.ChunkedArray:
    """Hex text to uint32: Arrow's cast reads hex after a 0x."""
    return pc.binary_join_element_wise("0x", digits, "").cast(pa.uint32())


def _sift(text: bytes, schema: pa.Schema) -> tuple[bytes, list[tuple[int, str]]]:
    good: list[bytes] = []
    rejected: list[tuple[int, str]] = []
    for number, line in enumerate(text.split(b"\n")[:-1]):
        reason = _what_is_wrong(line, schema)
        if reason is None:
            good.append(line + b"\n")
        else:
            rejected.append((number, reason))
    return b"".join(good), rejected


def _what_is_wrong(line: bytes, schema: pa.Schema) -> str | None:
    if not line:
        return "blank line"
    cells = line.split(b"\t")
    if len(cells) != len(schema):
        return f"{len(cells)} columns where {len(schema)} are expected"
    for name, cell in zip(schema.names, cells, strict=True):
        if name == LABEL:
            well_formed, expected = _is_integer(cell, 0, 1), "0 or 1"
        elif name in INTEGERS:
            well_formed, expected = not cell or _is_integer(cell, -(2**31), 2**31 - 1), "a 32-bit integer"
        else:
            well_formed, expected = not cell or bool(_HEX.fullmatch(cell)), "1 to 8 hex digits"
        if not well_formed:
            shown = cell[:40].decode("ascii", "backslashreplace")
            return f"{name} '{shown}' is not {expected}"
    return None


def _is_integer(cell: bytes, low: int, high: int) -> bool:
    match = _INTEGER.fullmatch(cell)
    return match is not None and low <= int(match[1] + match[2]) <= high
