"""Text to columns, at two nanoseconds a byte: the fast form of `data_pipeline.reference`.

Letters: n well-formed lines of a text, I integer columns, C categorical columns of one value, M list columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from data_pipeline.reference import Malformed, parse_line
from data_pipeline.schema import KINDS, LogSchema

_IGNORE, _LABEL, _INTEGER, _HEX, _CATEGORY, _LIST = range(len(KINDS))
_NEWLINE, _RETURN, _MINUS, _ZERO = 10, 13, 45, 48
_NO_DIGIT = 255
_HEX_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _digit, _character in enumerate(b"0123456789abcdef"):
    _HEX_DIGITS[[_character, ord(chr(_character).upper())]] = _digit

REASONS_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The well-formed lines of a text as columns, in the schema's order within each kind.

    label: int8 [n], empty without a label column.
    integers: int32 [I, n], 0 where integer_missing, bool [I, n]; float32 where the schema says that they are transformed, float64
        where one of them is no 32-bit integer.
    keys: uint32 or uint64 [C, n], 0 where key_missing, bool [C, n].
    list_keys: uint64 [M, ...], the lists of column m end to end; row i's ends at list_ends[m, i], int64 [M, n].
    starts: int64 [n], where each line begins in the text.
    lines: of the text, n + rejected.
    split_keys: times in seconds, float64 [n], or users' hashes, uint64 [n], where the schema has a column of such a kind.
    rejected: how many lines are malformed; reasons holds the first of them as (line of the text from 0, reason).
    """

    label: np.ndarray
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

    @property
    def rows(self) -> int:
        return len(self.starts)


def parse(text: bytes, schema: LogSchema) -> Parsed:
    """Parse whole lines, each ended by a newline (\\n or \\r\\n)."""
    assert not text or text[-1] == _NEWLINE, "a text ends with a newline"
    lines = text.count(b"\n")
    kinds = np.array([KINDS.index(column.kind) for column in schema.columns], np.uint8)
    separators = np.frombuffer("".join(column.separator for column in schema.columns).encode(), np.uint8)
    integers, singles, lists = len(schema.integers), len(schema.singles), len(schema.lists)
    # Every element of a list but a line's last is followed by its separator.
    longest = lines + sum(text.count(byte.encode()) for byte in {c.separator for c in schema.columns if c.kind == "list"})
    columns = (
        np.empty(lines if schema.labelled else 0, np.int8),
        np.empty((integers, lines), np.int32),
        np.empty((integers, lines), np.bool_),
        np.empty((singles, lines), schema.key_dtype),
        np.empty((singles, lines), np.bool_),
        np.empty((lists, longest if lists else 0), np.uint64),
        np.empty((lists, lines), np.int64),
        np.empty(lines, np.int64),
    )
    bad_lines, bad_starts = np.empty((2, REASONS_KEPT), np.int64)
    rows = _parse(
        np.frombuffer(text, np.uint8),
        kinds,
        np.uint8(ord(schema.separator)),
        separators,
        _HEX_DIGITS,
        *columns,
        bad_lines,
        bad_starts,
    )
    label, numbers, number_missing, keys, key_missing, list_keys, list_ends, starts = columns
    rejected = lines - rows
    known = min(rejected, REASONS_KEPT)
    return Parsed(
        label=label[:rows],
        integers=numbers[:, :rows],
        integer_missing=number_missing[:, :rows],
        keys=keys[:, :rows],
        key_missing=key_missing[:, :rows],
        list_keys=list_keys,
        list_ends=list_ends[:, :rows],
        starts=starts[:rows],
        lines=lines,
        rejected=rejected,
        reasons=tuple(
            (int(line), _reason(text, int(start), schema))
            for line, start in zip(bad_lines[:known], bad_starts[:known], strict=True)
        ),
    )


def _reason(text: bytes, start: int, schema: LogSchema) -> str:
    try:
        parse_line(text[start : text.index(b"\n", start)], schema)
    except Malformed as error:
        return str(error)
    raise AssertionError(f"the line at byte {start} is well-formed by the reference, and was rejected")


@numba.njit(nogil=True, cache=True)
def _parse(  # type: ignore[no-untyped-def]
    text, kinds, separator, list_separators, hex_digits, label, integers, integer_missing, keys, key_missing, list_keys, list_ends,
    starts, bad_lines, bad_starts,
):  # fmt: skip
    """Fill the columns row by row and return how many rows there are; a malformed line's row is overwritten by the next one."""
    position, row, line = 0, 0, 0
    while position < len(text):
        start = position
        starts[row] = start
        integer, single, many = 0, 0, 0
        # A line holding nothing is malformed, whatever a single column would take.
        good = text[position] != _NEWLINE and not (text[position] == _RETURN and text[position + 1] == _NEWLINE)
        for column in range(len(kinds)):
            if not good:
                break
            begin, kind = position, kinds[column]
            if kind == _HEX:
                value = np.uint64(0)
                digit = hex_digits[text[position]]
                while digit != _NO_DIGIT:
                    value = (value << np.uint64(4)) | np.uint64(digit)
                    position += 1
                    digit = hex_digits[text[position]]
                good = position - begin <= 8
                keys[single, row] = value
                key_missing[single, row] = position == begin
                single += 1
            elif _LABEL <= kind <= _INTEGER:
                number, negative = np.int64(0), text[position] == _MINUS
                position += negative
                begin += negative
                digit = text[position] - np.uint8(_ZERO)
                while digit <= 9:
                    if number <= 1 << 32:  # beyond, it is too large whatever follows
                        number = number * 10 + digit
                    position += 1
                    digit = text[position] - np.uint8(_ZERO)
                number = -number if negative else number
                empty = position == begin
                if kind == _LABEL:
                    good = not empty and (number == 0 or number == 1)
                    label[row] = number
                else:
                    good = -(1 << 31) <= number < 1 << 31 and not (empty and negative)
                    integers[integer, row] = number
                    integer_missing[integer, row] = empty
                    integer += 1
            else:
                inner = list_separators[column]
                end = np.int64(0)
                if kind == _LIST and row:
                    end = list_ends[many, row - 1]
                value, element = np.uint64(0xCBF29CE484222325), begin
                while True:
                    byte = text[position]
                    ended = byte == _NEWLINE or (byte == _RETURN and text[position + 1] == _NEWLINE)
                    ended |= byte == separator
                    if kind == _LIST and (ended or byte == inner) and not (ended and position == begin):
                        good = good and position > element
                        list_keys[many, end] = _finalize(value)
                        end += 1
                        value, element = np.uint64(0xCBF29CE484222325), position + 1
                    elif not ended:
                        value = (value ^ np.uint64(byte)) * np.uint64(0x100000001B3)
                    if ended:
                        break
                    position += 1
                if kind == _LIST:
                    list_ends[many, row] = end
                    many += 1
                elif kind == _CATEGORY:
                    keys[single, row] = np.uint64(0) if position == begin else _finalize(value)
                    key_missing[single, row] = position == begin
                    single += 1
            if column + 1 < len(kinds):
                good = good and text[position] == separator
                position += 1
        if good:
            position += text[position] == _RETURN
            good = text[position] == _NEWLINE
            position += 1
        if good:
            row += 1
        else:
            if line - row < len(bad_lines):
                bad_lines[line - row] = line
                bad_starts[line - row] = start
            position = start
            while text[position] != _NEWLINE:
                position += 1
            position += 1
        line += 1
    return row


@numba.njit(nogil=True, cache=True, inline="always")
def _finalize(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
