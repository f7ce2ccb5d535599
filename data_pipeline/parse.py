"""Text to columns by `csrc/parse.cpp`, at less than two nanoseconds a byte: the fast form of `data_pipeline.reference`.

Letters: n well-formed lines of a text, L labels, I integer columns, C categorical columns of one value, M list columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline import native
from data_pipeline.native import Array, Block, Columns
from data_pipeline.reference import Malformed, parse_line
from data_pipeline.schema import KINDS, LogSchema

REASONS_KEPT = 100
# Of arrays that hold a block of lines: few enough that memory follows them and not the text, so many that calls cost little.
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The well-formed lines of a text as columns, in the schema's order within each kind.

    labels: int8 [L, n].
    integers: int32 [I, n], 0 where integer_missing, bool [I, n]; float32 where the schema says that they are transformed, float64
        where one of them is no 32-bit integer.
    keys: uint32 or uint64 [C, n], 0 where key_missing, bool [C, n].
    list_keys: uint64 [M, ...], the lists of column m end to end; row i's ends at list_ends[m, i], int64 [M, n].
    starts: int64 [n], where each line begins in the text.
    lines: of the text, n + rejected.
    split_keys: times in seconds, float64 [n], or users' hashes, uint64 [n], where the schema has a column of such a kind.
    weights: of rows, float32 [n], where the schema has such a column.
    rejected: how many lines are malformed; reasons holds the first of them as (line of the text from 0, reason).
    """

    labels: np.ndarray
    integers: np.ndarray
    integer_missing: np.ndarray
    keys: np.ndarray
    key_missing: np.ndarray
    list_keys: np.ndarray
    list_ends: np.ndarray
    starts: np.ndarray
    lines: int
    rejected: int
    reasons: tuple[tuple[int, str], ...]
    split_keys: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.starts)


def parse(text: bytes | memoryview, schema: LogSchema) -> Parsed:
    """Parse whole lines, each ended by a newline (\\n or \\r\\n)."""
    whole = np.frombuffer(text, np.uint8)
    return _parse(whole, schema, measure(whole, schema, 1 << 62))


def parse_blocks(text: bytes | memoryview, schema: LogSchema, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Parsed]:
    """Parse whole lines, block after block, each as many lines as the arrays of `block_bytes` hold, but at least one.

    `starts` and the lines of `reasons` count from the text's beginning.
    """
    rest = np.frombuffer(text, np.uint8)
    begin = lines = 0
    while len(rest):
        block = measure(rest, schema, block_bytes)
        yield _parse(rest[: block.bytes], schema, block, begin=begin, first_line=lines)
        rest, begin, lines = rest[block.bytes :], begin + block.bytes, lines + block.lines


def longest_line(text: bytes | bytearray) -> int:
    """Bytes of the longest of whole lines, without its newline."""
    longest: int = native.longest_line(Array(np.frombuffer(text, np.uint8), np.uint8))
    return longest


def measure(text: np.ndarray, schema: LogSchema, room: int, *, element_ends: str = "") -> Block:
    """The lines at the text's beginning whose arrays take at most `room` bytes, but at least one.

    Args:
        text: whole lines, uint8.
        schema: of the log.
        room: in bytes.
        element_ends: characters that end elements of lists beside the columns' separators.
    """
    numbers = schema.number_dtype.itemsize + (4 if schema.number_dtype != np.int32 else 0)  # int32 first, then what they are to be
    cells = (1, numbers + 1, schema.key_dtype.itemsize + 1, 8, 8)  # of the arrays below, per line
    counts = (len(schema.labels), len(schema.integers), len(schema.singles), len(schema.lists), 1)
    line_bytes = sum(size * count for size, count in zip(cells, counts, strict=True))
    separators = {ord(byte) for column in schema.columns if column.kind == "list" for byte in column.separator + element_ends}
    block = Block()
    inner = Array(np.array(sorted(separators), np.uint8), np.uint8)
    native.measure_block(Array(text, np.uint8), inner, line_bytes, 8 * len(schema.lists), room, ctypes.byref(block))
    return block


def _parse(text: np.ndarray, schema: LogSchema, block: Block, *, begin: int = 0, first_line: int = 0) -> Parsed:
    integers, singles, lists, lines = len(schema.integers), len(schema.singles), len(schema.lists), block.lines
    arrays = {
        "labels": np.empty((len(schema.labels), lines), np.int8),
        "integers": np.empty((integers, lines), np.int32),
        "integer_missing": np.empty((integers, lines), np.bool_),
        "keys": np.empty((singles, lines), schema.key_dtype),
        "key_missing": np.empty((singles, lines), np.bool_),
        "list_keys": np.empty((lists, block.elements), np.uint64),
        "list_ends": np.empty((lists, lines), np.int64),
        "starts": np.empty(lines, np.int64),
    }
    bad = {name: np.empty(REASONS_KEPT, np.int64) for name in ("bad_lines", "bad_starts", "bad_ends")}
    columns = Columns(**{name: Array(array, array.dtype) for name, array in (arrays | bad).items()})
    kinds = np.array([KINDS.index(column.kind) for column in schema.columns], np.uint8)
    separators = np.frombuffer("".join(column.separator for column in schema.columns).encode(), np.uint8)
    line = native.Schema(Array(kinds, np.uint8), Array(separators, np.uint8), ord(schema.separator))
    rows = native.parse[schema.key_dtype](Array(text, np.uint8), ctypes.byref(line), ctypes.byref(columns))
    rejected = lines - rows
    first = [array[:rejected].tolist() for array in bad.values()]
    cut = {name: array if name == "list_keys" else array[..., :rows] for name, array in arrays.items()}
    cut["starts"] += begin
    cut["integers"] = cut["integers"].astype(schema.number_dtype, copy=False)
    return Parsed(
        **cut,
        lines=lines,
        rejected=rejected,
        reasons=tuple(
            (first_line + number, _reason(bytes(text[start:end]), schema)) for number, start, end in zip(*first, strict=True)
        ),
    )


def _reason(line: bytes, schema: LogSchema) -> str:
    try:
        parse_line(line, schema)
    except Malformed as error:
        return str(error)
    raise AssertionError(f"the line {line!r} is well-formed by the reference, and was rejected")
