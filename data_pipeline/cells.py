"""Conversion of Arrow columns to `data_pipeline.parse.Parsed`, with equal results for text and numeric cells.

Integers, hex digits and labels are read from text as `data_pipeline.reference` reads them. An integer in a category column is
hashed as its decimal digits, so 7 in Parquet, 7 and "7" in JSON and 7 in CSV are one value; true in Parquet and JSON is 1.

Letters: n rows of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline import native
from data_pipeline.errors import UserError
from data_pipeline.native import Array
from data_pipeline.parse import REASONS_KEPT, Parsed
from data_pipeline.reference import EXPECTED, mismatch
from data_pipeline.schema import NUMBER, Column, Kind, LogSchema

_INTEGER = r"^-?0*[0-9]{1,19}(\.0+)?$"
_ISO_8601 = (
    r"^[0-9]{4}-[01][0-9]-[0-3][0-9]"
    r"(Z|[ T][0-2][0-9]:[0-5][0-9](:[0-5][0-9](\.[0-9]{1,9})?)?(Z| ?UTC| ?[+-][0-2][0-9](:?[0-5][0-9])?)?)?$"
)
_TIME = pa.timestamp("us", "UTC")
_EXACT = 2.0**53  # beyond this, float64 cannot hold every integer


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """A column: float64 numbers or uint64 keys [n] (of lists all keys, and lengths [n]); missing and malformed cells, bool [n]."""

    values: np.ndarray
    missing: np.ndarray
    bad: np.ndarray
    lengths: np.ndarray | None = None


def parse_table(table: pa.Table, schema: LogSchema) -> tuple[Parsed, np.ndarray]:
    """Read cells, and find the well-formed rows.

    Args:
        table: the schema's columns except ignored ones, of any Arrow type that fits their kinds; row numbers become the starts and
            lines of the result.

    Returns:
        The well-formed rows, and a mask of them, bool [rows].

    Raises:
        ValueError: a column has a type that can't be read as its kind.
    """
    arrays, rows = dict[str, np.ndarray](), len(table)
    goals: dict[str, list[tuple[str, np.ndarray]]] = {column.name: [] for column in schema.columns}
    for name, what, names, dtype in (
        ("labels", "values", schema.of_kind("label"), np.dtype(np.int8)),
        ("integers", "values", schema.integers, schema.number_dtype),
        ("integer_missing", "missing", schema.integers, np.dtype(np.bool_)),
        ("keys", "values", schema.singles, schema.key_dtype),
        ("key_missing", "missing", schema.singles, np.dtype(np.bool_)),
        ("list_ends", "lengths", schema.lists, np.dtype(np.int64)),
        ("times", "values", schema.of_kind("time"), np.dtype(np.float64)),
        ("weights", "values", schema.of_kind("weight"), np.dtype(np.float32)),
    ):
        arrays[name] = np.empty((len(names), rows), dtype)
        for column_name, row in zip(names, arrays[name], strict=True):
            goals[column_name].append((what, row))
    used, lists = [column for column in schema.columns if column.kind != "ignore"], list[tuple[np.ndarray, np.ndarray]]()
    bad: dict[str, np.ndarray] = {}
    for column in used:  # one at a time, to bound memory
        cells = _read(table.column(column.source), column, schema)
        for what, row in goals[column.name]:
            row[:] = getattr(cells, what)
        lists += [(cells.values, cells.lengths)] if cells.lengths is not None else []
        bad |= {column.name: cells.bad} if cells.bad.any() else {}
    good = ~np.any([np.zeros(rows, np.bool_), *bad.values()], axis=0)
    count, reasons = int(good.sum()), []
    for row in np.flatnonzero(~good)[:REASONS_KEPT].tolist():
        column = next(column for column in used if column.name in bad and bad[column.name][row])
        cell = _as_text(table.column(column.source)[row].as_py(), column)
        reasons.append((row, mismatch(cell, column)))
    for row in (row for array in arrays.values() for row in array) if bad else ():
        row[:count] = row[good]
    kept = {name: array[:, :count] for name, array in arrays.items()}
    ends, times, weights = (kept.pop(name) for name in ("list_ends", "times", "weights"))
    parsed = Parsed(
        **kept,
        list_keys=tuple(keys[np.repeat(good, lengths)] if bad else keys for keys, lengths in lists),
        list_ends=ends.cumsum(axis=1),
        starts=np.flatnonzero(good),
        lines=rows,
        rejected=rows - count,
        reasons=tuple(reasons),
        times=times[0] if len(times) else None,
        weights=weights[0] if len(weights) else None,
    )
    return parsed, good


def _read(array: pa.Array | pa.ChunkedArray, column: Column, schema: LogSchema) -> _Cells:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.UuidArray):
        array = pa.array([None if uuid is None else str(uuid) for uuid in array.to_pylist()], pa.large_string())
    if pa.types.is_dictionary(array.type):
        return _read_dictionary(array, column, schema)
    array = _decimals_as_floats(array)
    is_text, numbers = _is_text(array.type), schema.missing_numbers
    if schema.missing and is_text:
        texts = array.cast(pa.large_binary())
        array = pc.if_else(pc.is_in(texts, pa.array([text.encode() for text in schema.missing], texts.type)), None, texts)
    types = pa.types
    if numbers and any(is_type(array.type) for is_type in (types.is_integer, types.is_floating, types.is_decimal)):
        array = pc.if_else(pc.is_in(array.cast(pa.float64(), safe=False), pa.array(numbers, pa.float64())), None, array)
    try:
        match column.kind:
            case "integer" | "int64" | "float" if numbers and is_text:
                cells = _read_numbers(array, column.kind)
                missing = cells.missing | np.isin(cells.values, numbers) & ~cells.bad
                return replace(cells, values=np.where(missing, 0, cells.values), missing=missing)
            case "label" | "integer" | "int64" | "float" | "weight" | "time":
                return _read_numbers(array, column.kind)
            case "hex":
                return _read_hex(array)
            case "list":
                return _read_lists(array, column)
            case _:
                return _read_texts(array)
    except pa.ArrowException as error:
        raise UserError(f"{column.name} has type {array.type}, which is not {EXPECTED[column.kind]} in each row") from error


def _read_dictionary(array: pa.DictionaryArray, column: Column, schema: LogSchema) -> _Cells:
    """Read each distinct value once, unless the dictionary is longer than the block."""
    if column.kind == "list" or len(array.dictionary) > len(array):
        return _read(array.dictionary_decode(), column, schema)
    distinct = pa.concat_arrays([array.dictionary, pa.nulls(1, array.dictionary.type)])
    codes = _numpy(array.indices.cast(pa.int64()), len(array.dictionary))
    cells = _read(distinct, column, schema)
    return _Cells(values=cells.values[codes], missing=cells.missing[codes], bad=cells.bad[codes])


def _read_numbers(array: pa.Array, kind: Kind) -> _Cells:
    if kind == "time" and _is_text(array.type):
        array = _times(array)
    if pa.types.is_temporal(array.type):
        array = _seconds(array.cast(pa.timestamp("us"), safe=False))  # without nanoseconds
    if _is_text(array.type) and kind in ("label", "integer"):
        cells = _read_each(array, native.read_labels if kind == "label" else native.read_integers)
        values, missing, bad = cells.values.view(np.int64).astype(np.float64), cells.missing, cells.bad
    elif _is_text(array.type):
        text = array.cast(pa.large_binary())
        numeric = pc.match_substring_regex(text, _INTEGER if kind == "int64" else f"^{NUMBER}$").fill_null(False)
        values = _numpy(pc.if_else(numeric, text, None).cast(pa.large_string()).cast(pa.float64()), np.nan)
        missing = _numpy(pc.equal(pc.binary_length(text), 0), True)
        bad = ~missing & ~_numpy(numeric)
    else:
        values = _numpy(
            array.cast(pa.int8() if pa.types.is_boolean(array.type) else array.type).cast(pa.float64(), safe=False), np.nan
        )
        missing, bad = np.isnan(values), np.zeros(len(array), np.bool_)
    values = np.where(missing | bad, 0, values)
    bad |= ~np.isfinite(values)
    if kind in ("label", "integer", "int64"):
        low, high = {"label": (0, 2), "integer": (-(2.0**31), 2.0**31), "int64": (-(2.0**63), 2.0**63)}[kind]
        # 2**63 - 1, the largest, is 2**63 in float64.
        bad |= (values != np.floor(values)) | (values < low) | (values > high if kind == "int64" else values >= high)
    if kind in ("weight", "float"):
        bad |= np.abs(values) > np.finfo(np.float32).max
    if kind == "weight":
        bad |= values < 0
    if kind in ("label", "weight", "time"):
        bad |= missing
    return _Cells(values=np.where(bad, 0, values), missing=missing & ~bad, bad=bad)


def _times(array: pa.Array) -> pa.Array:
    """Convert ISO 8601 dates and times to seconds since 1970 (UTC if no zone is given), as text; leave numbers as they are."""
    text = array.cast(pa.large_binary())
    dated = pc.match_substring_regex(text, _ISO_8601).fill_null(False)
    if not pc.any(dated).as_py():
        return text
    dates = pc.if_else(dated, text, None).cast(pa.large_string())
    for pattern, replacement in (
        (r"( ?UTC|Z)$", ""),
        (r" ([+-][0-9:]*)$", r"\1"),
        (r"(\.[0-9]{6})[0-9]+", r"\1"),  # nanoseconds
        (r"^([^ T]*)$", r"\1 00:00"),
        (r"([ T][0-9:.]*)$", r"\1+00:00"),
    ):
        dates = pc.replace_substring_regex(dates, pattern, replacement)
    try:
        stamps = dates.cast(_TIME)
    except pa.ArrowInvalid:  # which doesn't name the row
        stamps = pa.array([_stamp(date) for date in dates], _TIME)
    return pc.if_else(stamps.is_valid(), _seconds(stamps).cast(pa.large_string()).cast(pa.large_binary()), text)


def _seconds(stamps: pa.Array) -> pa.Array:
    return pc.divide(stamps.cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)  # exact up to the year 2255


def _stamp(date: pa.LargeStringScalar) -> pa.TimestampScalar | None:
    try:
        return date.cast(_TIME)
    except pa.ArrowInvalid:  # such as 30 February
        return None


def _read_hex(array: pa.Array) -> _Cells:
    if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        numbers = _read_numbers(array, "int64")
        bad = numbers.bad | (numbers.values < 0) | (numbers.values >= 2.0**32)
        return _Cells(values=np.where(bad, 0, numbers.values).astype(np.uint64), missing=numbers.missing, bad=bad)
    return _read_each(array, native.read_hex_digits)


def _read_each(array: pa.Array, read: Callable[..., int]) -> _Cells:
    """Read texts with a function of `csrc/cells.cpp`; empty ones are missing."""
    texts = array.cast(pa.large_binary())
    offsets = np.zeros(1, np.int64)
    if len(texts):
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    values, bad = np.empty(len(texts), np.uint64), np.empty(len(texts), np.bool_)
    read(*(Array(array, array.dtype) for array in (content, offsets, values, bad)))
    missing = (offsets[1:] == offsets[:-1]) | ~_numpy(texts.is_valid())
    values[missing | bad] = 0
    return _Cells(values=values, missing=missing, bad=bad & ~missing)


def _read_texts(array: pa.Array) -> _Cells:
    bad = np.zeros(len(array), np.bool_)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_floating(array.type):  # pandas stores integer columns with missing values as floats
        values = _numpy(array.cast(pa.float64()), np.nan)
        missing = np.isnan(values)
        bad = ~missing & ~((values == np.floor(values)) & (np.abs(values) < _EXACT))
        array = pa.array(np.where(missing | bad, 0, values).astype(np.int64), mask=missing | bad)
    cells = _read_each(array if _is_text(array.type) else array.cast(pa.large_string()), native.hash_texts)
    return _Cells(values=cells.values, missing=cells.missing & ~bad, bad=bad)


def _decimals_as_floats(array: pa.Array) -> pa.Array:
    """Return decimals as the nearest floats; Arrow's own cast is off in the last place. Those of scale 0 stay."""
    has_fractions = pa.types.is_decimal(array.type) and array.type.scale
    return array.cast(pa.large_string()).cast(pa.float64()) if has_fractions else array


def _read_lists(array: pa.Array, column: Column) -> _Cells:
    if not _is_list(array.type):
        text = (array if _is_text(array.type) else array.cast(pa.large_string())).cast(pa.large_binary())
        array = pc.if_else(pc.equal(pc.binary_length(text), 0), None, pc.split_pattern(text, column.separator))
    array = array.cast(pa.large_list(array.type.value_type))
    lengths = _numpy(pc.list_value_length(array).fill_null(0)).astype(np.int64)
    elements = _read_texts(_decimals_as_floats(array.flatten()))
    bad = np.zeros(len(array), np.bool_)
    bad[np.searchsorted(lengths.cumsum(), np.flatnonzero(elements.missing | elements.bad), side="right")] = True
    return _Cells(values=elements.values, missing=lengths == 0, bad=bad, lengths=lengths)


def _is_text(arrow_type: pa.DataType) -> bool:
    types = pa.types
    texts = types.is_string, types.is_large_string, types.is_string_view
    bytes_ = types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary
    return any(is_type(arrow_type) for is_type in (*texts, *bytes_))


def _is_list(arrow_type: pa.DataType) -> bool:
    """Whether an array of this type holds lists."""
    return any(is_type(arrow_type) for is_type in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _numpy(array: pa.Array | pa.ChunkedArray, null: object = None) -> np.ndarray:
    filled = array if null is None else array.fill_null(null)
    values: np.ndarray = filled.to_numpy(zero_copy_only=False)
    return values


def _as_text(cell: object, column: Column) -> bytes:
    """Format a cell as a text log would hold it."""
    if isinstance(cell, list):
        return column.separator.encode().join(b"null" if element is None else _as_text(element, column) for element in cell)
    return cell if isinstance(cell, bytes) else b"" if cell is None else str(cell).removesuffix(".0").encode()
