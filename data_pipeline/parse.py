"""Parsing of text into columns by `csrc/parse.cpp`, in less than two nanoseconds per byte; `data_pipeline.reference` defines it.

Letters: n well-formed lines of a text, L labels, I integer columns, C categorical columns of one value, M list columns.
"""

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline import native
from data_pipeline.native import Array, Columns
from data_pipeline.reference import Malformed, parse_line
from data_pipeline.schema import KINDS, LogSchema

REASONS_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The well-formed lines of a text as columns, in the schema's order within each kind.

    labels: int8 [L, n].
    integers: int32 [I, n], 0 where integer_missing, bool [I, n]; float64 if some are not 32-bit integers or are standardized.
    keys: uint32 or uint64 [C, n], 0 where key_missing, bool [C, n].
    list_keys: M arrays of uint64, the lists of column m concatenated; row i's list ends at list_ends[m, i], int64 [M, n].
    starts: int64 [n], where each line begins in the text.
    lines: the number of lines in the text, n + rejected.
    times: in seconds, float64 [n], if the schema has a time column.
    weights: of rows, float32 [n], if the schema has a weight column.
    rejected: the number of malformed lines; reasons holds the first of them as (line of the text from 0, reason).
    """

    labels: np.ndarray
    integers: np.ndarray
    integer_missing: np.ndarray
    keys: np.ndarray
    key_missing: np.ndarray
    list_keys: tuple[np.ndarray, ...]
    list_ends: np.ndarray
    starts: np.ndarray
    lines: int
    rejected: int
    reasons: tuple[tuple[int, str], ...]
    times: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.starts)

    def rows_in(self, cells: int) -> int:
        """Return how many rows have about so many cells and elements of lists, but at least 1."""
        columns = (len(self.labels), len(self.integers), len(self.keys), len(self.list_ends))
        all_cells = sum(columns) * self.rows + sum(map(len, self.list_keys))
        return max(1, cells * self.rows // max(1, all_cells))


def parse(text: np.ndarray, schema: LogSchema) -> Parsed:
    """Parse the bytes of whole lines, each ending with a newline (\\n or \\r\\n)."""
    kinds = np.array([KINDS.index(column.kind) for column in schema.columns], np.uint8)
    separators = np.frombuffer("".join(column.separator for column in schema.columns).encode(), np.uint8)
    line = native.Schema(Array(kinds, np.uint8), Array(separators, np.uint8), ord(schema.separator))
    integers, singles, lists = len(schema.integers), len(schema.singles), len(schema.lists)
    elements = np.zeros(lists, np.int64)
    lines = native.count_cells(Array(text, np.uint8), ctypes.byref(line), Array(elements, np.int64))
    arrays: dict[str, np.ndarray] = {
        "labels": np.empty((len(schema.labels), lines), np.int8),
        "integers": np.empty((integers, lines), np.int32),
        "integer_missing": np.empty((integers, lines), np.bool_),
        "keys": np.empty((singles, lines), schema.key_dtype),
        "key_missing": np.empty((singles, lines), np.bool_),
        "list_ends": np.empty((lists, lines), np.int64),
        "starts": np.empty(lines, np.int64),
    }
    in_lists = {"list_keys": np.empty(elements.sum(), np.uint64), "list_begins": np.append(0, elements.cumsum())}
    bad = {name: np.empty(REASONS_KEPT, np.int64) for name in ("bad_lines", "bad_starts", "bad_ends")}
    columns = Columns(**{name: Array(array, array.dtype) for name, array in (arrays | in_lists | bad).items()})
    rows = native.parse[schema.key_dtype](Array(text, np.uint8), ctypes.byref(line), ctypes.byref(columns))
    first = zip(*(array[: lines - rows].tolist() for array in bad.values()), strict=True)
    cut = {name: array[..., :rows] for name, array in arrays.items()}
    cut["integers"] = cut["integers"].astype(schema.number_dtype, copy=False)
    reasons = tuple((number, _reason(bytes(text[start:end]), schema)) for number, start, end in first)
    rooms = np.split(in_lists["list_keys"], in_lists["list_begins"][1:-1])
    list_keys = tuple(room[: ends[-1] if rows else 0] for room, ends in zip(rooms, cut["list_ends"], strict=False))
    return Parsed(**cut, list_keys=list_keys, lines=lines, rejected=lines - rows, reasons=reasons)


def _reason(line: bytes, schema: LogSchema) -> str:
    try:
        parse_line(line, schema)
    except Malformed as error:
        return str(error)
    raise AssertionError(f"the line {line!r} was rejected although the reference parses it")


def truncate_lists(parsed: Parsed, schema: LogSchema) -> Parsed:
    """Keep the first `max_length` elements of each list, in columns that have such a limit."""
    limits = [schema.column_of(name).max_length for name in schema.lists]
    list_keys, list_ends = list(parsed.list_keys), parsed.list_ends.copy() if any(limits) else parsed.list_ends
    for number, limit in enumerate(limits):
        if limit:
            keys, ends = list_keys[number], list_ends[number]
            lengths = np.diff(ends, prepend=0)
            list_keys[number] = keys[np.arange(len(keys)) - np.repeat(ends - lengths, lengths) < limit]
            list_ends[number] = np.cumsum(np.minimum(lengths, limit))
    return replace(parsed, list_keys=tuple(list_keys), list_ends=list_ends)


def list_elements(parsed: Parsed, column: int, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a list column's elements in the given rows, concatenated, and the length of each row's list."""
    keys, ends = parsed.list_keys[column], parsed.list_ends[column]
    lengths = np.diff(ends, prepend=0)
    if isinstance(rows, slice):
        begin = rows.indices(len(ends))[0]
        first = ends[begin - 1] if begin else 0
        return keys[first : first + lengths[rows].sum()], lengths[rows]
    chosen = np.zeros(len(ends), np.bool_)
    chosen[rows] = True
    return keys[np.repeat(chosen, lengths)], lengths[rows]
