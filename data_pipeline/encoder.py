"""Encoding of a few raw rows with a data set's vocabularies, as serving does for a request.

    encoder = RequestEncoder("data/")
    dense, values, lengths = encoder([{"I1": 3, "I2": None, ..., "C1": "2dbcbc4c", ...}, ...])

The results equal what `comera preprocess` writes for the same values, computed by the same functions. Vocabularies are hash tables
mapped into memory: they load in milliseconds, and several processes share them.

Letters: B rows, I integer columns, F categorical columns.
"""

import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.errors import UserError
from data_pipeline.hashing import IdSource, shares
from data_pipeline.manifest import CategoricalColumn, IntegerColumn, Manifest, check_file, read_manifest
from data_pipeline.parse import Parsed, truncate_lists
from data_pipeline.parts import detect_schema, json_names, layout_of
from data_pipeline.reference import hash_text
from data_pipeline.schema import NOT_FEATURES, Column, LogSchema, criteo_schema
from data_pipeline.shards import Encoder
from data_pipeline.sources import Source
from data_pipeline.splits import Rows

_HEX = re.compile(r"[0-9a-fA-F]{1,8}")
_LARGEST = float(np.finfo(np.float32).max)


class Flat(NamedTuple):
    """Encoded rows as a served model takes them, one categorical column after the other."""

    dense: np.ndarray  # [B, I] float32
    values: np.ndarray  # [sum(lengths)] int64 ids
    lengths: np.ndarray  # [F * B] int32 ids of each column and row


def schema_of_new_logs(manifest: Manifest, data: Path, log: Source, *, given: LogSchema | None = None) -> LogSchema:
    """Return the schema of new logs for a data set, which may lack labels (all of them), weights and times.

    Args:
        given: of the user; None to detect it for Criteo's logs, or else take that of the data set's logs.

    Raises:
        ValueError: a column is missing, has another kind or setting, or is out of order; or the labels differ.
    """
    known = manifest.log
    schema = given or _detected(known, log)

    def columns(log_schema: LogSchema) -> list[str]:
        return [f"{column.name} ({_settings(column)})" for column in log_schema.columns if column.kind not in NOT_FEATURES]

    if schema.labels and known.labels and schema.labels != known.labels:
        raise UserError(
            f"`input` {log} has the labels {', '.join(schema.labels)} where {data} has {', '.join(known.labels)}; "
            "give logs with all of these labels or none, or name the columns with `schema`"
        )
    for actual, expected in zip_longest(columns(schema), columns(known), fillvalue="none"):
        if actual != expected:
            raise UserError(
                f"`input` {log} has other columns than the logs of {data}: {actual} where {expected} is expected; "
                "give logs with the same columns, or name them with `schema`"
            )
    return schema


def _detected(known: LogSchema, log: Source) -> LogSchema:
    if known in (criteo_schema(labeled=True), criteo_schema(labeled=False)):
        return detect_schema(log)
    layout = layout_of(log, known)
    names = layout if isinstance(layout, tuple) else json_names(log) if layout else ()
    named = set(names) or {column.source for column in known.columns}
    kept = [column for column in known.columns if column.kind not in NOT_FEATURES or column.source in named]
    return replace(known, columns=tuple(kept))


def _settings(column: Column) -> str:
    """Format the settings that determine a column's encoded values, apart from the vocabulary."""
    settings = {name: getattr(column, name) for name in ("transform", "hash_buckets", "max_length")}
    defaults = Column(name=column.name, kind=column.kind)
    return ", ".join([column.kind, *(f"{name} {value}" for name, value in settings.items() if value != getattr(defaults, name))])


def open_encoder(
    integers: tuple[IntegerColumn, ...],
    columns: tuple[CategoricalColumn, ...],
    folder: Path,
    schema: LogSchema,
    *,
    room: int = sys.maxsize,
    threads: int = 1,
) -> Encoder:
    """Open a data set's encoder, with its tables mapped into memory.

    Args:
        room: the most bytes of tables to keep in memory. The smallest tables are kept whole and shared by all threads.
        threads: how many look up ids at once; of a table that isn't kept whole, each keeps a separate range.

    Raises:
        ValueError: a table is missing, or its size differs from the manifest's.
    """
    paths = [check_file(column.table, folder) for column in columns if column.table]
    sizes = [path.stat().st_size for path in paths]
    given = [share if share == size else share // threads for size, share in zip(sizes, shares(sizes, room), strict=True)]
    tables = (IdSource(path, schema.key_dtype, share) for path, share in zip(paths, given, strict=True))
    return Encoder(
        schema=schema,
        integers=integers,
        id_sources=tuple(next(tables) if column.table else IdSource(buckets=column.num_embeddings) for column in columns),
        num_embeddings=tuple(column.num_embeddings for column in columns),
    )


def flatten(encoder: Encoder, parsed: Parsed, rows: Rows = slice(None)) -> Flat:
    """Encode parsed rows as a served model takes them."""
    size = len(parsed.starts[rows])
    dense = np.ascontiguousarray(encoder.numbers(parsed, rows).T)
    ids, _ = encoder.singles(parsed, rows)
    values, lengths = [ids.ravel()], np.ones((len(encoder.id_sources), size), np.int32)
    for number in range(len(parsed.list_ends)):
        elements, lengths[len(ids) + number], _ = encoder.list(parsed, number, rows)
        values.append(elements)
    return Flat(dense, np.concatenate(values, dtype=np.int64), lengths.ravel())


class RequestEncoder:
    """Encodes rows given as values by column.

    Integers are int or whole float (any float in columns of kind float), hex columns str of 1 to 8 hex digits, other categories
    str or int (or bool, as 1 or 0), list columns lists of these. None, an empty list and, in a categorical column, "" stand for a
    missing value.
    Unknown names are ignored.

    Raises:
        ValueError: it is not a data set, or its tables are missing.
    """

    def __init__(self, data: str | Path) -> None:
        manifest = self.manifest = read_manifest(data)
        self._encoder = open_encoder(manifest.integer_columns, manifest.categorical_columns, Path(data), manifest.log)
        schema = self._encoder.schema
        self._columns = [[schema.column_of(name) for name in names] for names in (schema.integers, schema.singles, schema.lists)]
        self._dtypes = schema.number_dtype, schema.key_dtype

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Flat:
        """Encode rows.

        Raises:
            ValueError: a column is missing or holds a value of another kind; the message names the row and column.
        """
        schema = self._encoder.schema
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"row {number} is {_show(row)}, which is not an object with a value for each column")
        marks: tuple[str | float, ...] = (*schema.missing, *schema.missing_numbers)
        numbers, keys, lists = ([_cells(rows, column, marks) for column in columns] for columns in self._columns)
        integers, integer_missing = _columns(numbers, len(rows), self._dtypes[0])
        singles, key_missing = _columns(keys, len(rows), self._dtypes[1])
        parsed = Parsed(
            labels=np.empty((0, len(rows)), np.int8),
            integers=integers,
            integer_missing=integer_missing,
            keys=singles,
            key_missing=key_missing,
            list_keys=tuple(np.array(list(chain.from_iterable(column)), np.uint64) for column in lists),
            list_ends=np.array([[len(cell) for cell in column] for column in lists], np.int64)
            .reshape(len(lists), len(rows))
            .cumsum(axis=1),
            starts=np.arange(len(rows)),
            lines=len(rows),
            rejected=0,
            reasons=(),
        )
        return flatten(self._encoder, truncate_lists(parsed, schema))


def _cells(rows: Sequence[Mapping[str, Any]], column: Column, marks: Sequence[str | float]) -> list[Any]:
    """Read a column's values; None where missing, or one of the marks of missing values."""
    cells: list[Any] = []
    read, expected = _READ[column.kind]
    try:
        for row in rows:
            cell = row[column.name]
            cells.append(read(None if marks and type(cell) is not bool and cell in marks else cell))
    except KeyError as error:
        raise UserError(f"row {len(cells)} has no {column.name}; give null where its value is missing") from error
    except ValueError as error:
        shown = _show(rows[len(cells)][column.name])
        raise UserError(f"row {len(cells)}: {column.name} is {shown}, which is not {expected}") from error
    return cells


def _columns(columns: list[list[Any]], rows: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Stack columns: values [columns, rows], 0 where missing, and the missing cells, bool [columns, rows]."""
    cells = np.array(columns, object).reshape(len(columns), rows)
    missing: np.ndarray = np.equal(cells, np.array(None))
    cells[missing] = 0
    return cells.astype(dtype), missing


def _integer(cell: Any, bits: int = 32) -> int | None:
    if type(cell) is float and cell.is_integer():
        cell = int(cell)  # as in logs
    if cell is None or (type(cell) is int and -(1 << bits - 1) <= cell < 1 << bits - 1):
        return cell
    raise ValueError


def _float(cell: Any) -> float | None:
    if cell is None or (type(cell) in (int, float) and abs(cell) <= _LARGEST):
        return cell
    raise ValueError


def _hex(cell: Any) -> int | None:
    if cell is None or cell == "":
        return None
    if type(cell) is str and _HEX.fullmatch(cell):
        return int(cell, 16)
    raise ValueError


def _text(cell: Any) -> int | None:
    if cell is None or cell == "":
        return None
    if type(cell) in (int, bool):
        return hash_text(b"%d" % cell)
    if type(cell) is str:
        return hash_text(cell.encode())  # half of a surrogate pair raises UnicodeEncodeError, a ValueError
    raise ValueError


def _list(cell: Any) -> list[int]:
    if cell is None:
        return []
    if type(cell) is not list:
        raise ValueError
    keys = [key for element in cell if (key := _text(element)) is not None]
    if len(keys) < len(cell):
        raise ValueError
    return keys


_READ: dict[str, tuple[Callable[[Any], Any], str]] = {  # of each kind, what reads a cell, and what it expects
    "integer": (_integer, "a 32-bit integer or null"),
    "int64": (partial(_integer, bits=64), "a 64-bit integer or null"),
    "float": (_float, "a finite number or null"),
    "hex": (_hex, "a string of 1 to 8 hex digits or null"),
    "category": (_text, "a string, an integer or null"),
    "list": (_list, "a list of non-empty strings or integers, or null"),
}


def _show(value: Any) -> str:
    """Return a value in ASCII, without deeply nested parts, for an error message."""
    return reprlib.repr(value).encode("ascii", "backslashreplace").decode()
