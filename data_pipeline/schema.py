"""Log schemas: the columns of a log, their kinds, and the format of its lines.

    format = "csv"                 # "text": without quoting; "jsonl": one object per line. Parquet is detected
    separator = ","                # the default of "csv"; other formats default to a tab
    header = true                  # each log starts with a line of column names; else columns are identified by position
    missing = ["NA", "NaN"]        # texts of missing cells, besides empty ones
    [columns]
    click = "label"                # 0 or 1; stored as `label`, or under the columns' names if there are several
    shop = "category"              # any text or integers, kept as a 64-bit hash
    price_cents = "integer"        # 32 bits; "int64" and "float" are other numbers
    tags = { kind = "list", separator = " ", max_length = 20 }
    user = { kind = "category", column = "user_id", hash_buckets = 100_000 }
    rating = { kind = "float", transform = "standardize" }
    importance = "weight"          # the row's weight in the loss
    at = "time"                    # ISO 8601 or numbers; used by `--split time`, not stored

Criteo's columns are built in: label, counts I1..I13, categories C1..C26 of 1 to 8 hex digits ("hex").
"""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data_pipeline.errors import UserError

# The columns of a Criteo log, in the order of a line.
LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
Kind = Literal["ignore", "label", "integer", "hex", "category", "list", "int64", "float", "weight", "time"]
KINDS = ("ignore", "label", "integer", "hex", "category", "list")  # those that `parse` reads
Transform = Literal["log", "standardize", "none"]
Format = Literal["text", "csv", "jsonl"]
NOT_FEATURES: tuple[Kind, ...] = ("ignore", "label", "weight", "time")
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"  # as a text
_NUMBERS: tuple[Kind, ...] = ("integer", "int64", "float")
_CATEGORIES: tuple[Kind, ...] = ("hex", "category", "list")
_LONGEST_NAME = 150  # in bytes; file systems allow 255, and unfinished files have longer names
_UNLABELED = len(INTEGERS) + len(CATEGORIES)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a log.

    Args:
        name: of the column in the data set.
        kind: the type of its cells.
        separator: stands between the elements of a list.
        column: its name in logs that name their columns; "" if it is the same.
        transform: of a number: "log" for log(x + offset), "standardize" for (x - mean) / standard deviation, "none" for x.
        hash_buckets: hash a category's values into ids 1..hash_buckets - 1; None for a vocabulary.
        max_length: the most elements that a list keeps, from the first on.
    """

    name: str
    kind: Kind
    separator: str = "|"
    column: str = ""
    transform: Transform = "log"
    hash_buckets: int | None = None
    max_length: int | None = None

    @property
    def source(self) -> str:
        """The column's name in logs that name their columns."""
        return self.column or self.name


@dataclass(frozen=True, kw_only=True)
class LogSchema:
    """The columns in the order of a line, the separator between them, and whether each file starts with a line of column names.

    missing: texts that stand for missing cells, besides empty ones.
    """

    columns: tuple[Column, ...]
    separator: str = "\t"
    header: bool = False
    format: Format = "text"
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", self.header and self.format != "jsonl")

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """Return the names of the columns of these kinds, in the order of a line."""
        return tuple(column.name for column in self.columns if column.kind in kinds)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels in the data set: `label` if there is only one, else the column names."""
        names = self.of_kind("label")
        return (LABEL,) if len(names) == 1 else names

    @property
    def weight(self) -> str | None:
        """Name of the column of row weights; None if there is none."""
        return next(iter(self.of_kind("weight")), None)

    @cached_property
    def integers(self) -> tuple[str, ...]:
        """Names of the numeric columns of all kinds."""
        return self.of_kind(*_NUMBERS)

    @cached_property
    def number_dtype(self) -> np.dtype:
        """dtype of parsed numbers."""
        columns = [self.column_of(name) for name in self.integers]
        wide = any(column.kind in ("int64", "float") or column.transform == "standardize" for column in columns)
        return np.dtype(np.float64 if wide else np.int32)

    @property
    def missing_numbers(self) -> tuple[float, ...]:
        """Those of `missing` that are numbers."""
        return tuple(float(text) for text in self.missing if re.fullmatch(NUMBER, text))

    @property
    def is_plain_text(self) -> bool:
        """Whether `parse` can read logs of this format and these kinds of columns."""
        return self.format != "jsonl" and not self.missing and all(column.kind in KINDS for column in self.columns)

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def column_of(self, name: str) -> Column:
        return self._by_name[name]

    @cached_property
    def singles(self) -> tuple[str, ...]:
        """Names of the categorical columns of one value per row."""
        return self.of_kind("hex", "category")

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Names of the categorical columns of any number of values per row."""
        return self.of_kind("list")

    @cached_property
    def categories(self) -> tuple[str, ...]:
        """Names of the categorical columns: singles, then lists. Column numbers follow this order everywhere."""
        return self.singles + self.lists

    @property
    def key_dtype(self) -> np.dtype:
        """dtype of category keys: 32 bits if all are hex digits, else 64 bits for hashes."""
        return np.dtype(np.uint64 if self.of_kind("category", "list") else np.uint32)


def criteo_schema(*, labeled: bool) -> LogSchema:
    """Return the schema of Criteo's logs."""
    label = [Column(name=LABEL, kind="label")] if labeled else []
    integers = [Column(name=name, kind="integer") for name in INTEGERS]
    return LogSchema(columns=(*label, *integers, *(Column(name=name, kind="hex") for name in CATEGORIES)))


def detect_criteo_schema(text: bytes) -> LogSchema:
    """Return Criteo's schema, with or without label according to the number of columns in most of a log's first lines.

    Raises:
        ValueError: no line has 40 or 39 columns, or lines of 39 have a label.
    """
    lines = [line.split(b"\t") for line in text.split(b"\n", 100)[:100]]
    counts = Counter(map(len, lines))
    labeled, unlabeled = counts[_UNLABELED + 1], counts[_UNLABELED]
    found = "" if labeled or unlabeled else f"{counts.most_common(1)[0][0]} columns"
    if unlabeled > labeled:
        columns = ({cells[at] for cells in lines if len(cells) == _UNLABELED} for at in (0, len(INTEGERS), len(INTEGERS) + 1))
        firsts, thirteenth, keys = columns  # if it is so
        are_short, are_keys = (all(re.fullmatch(rb"(-?\d{1,7})?", cell) for cell in cells) for cells in (thirteenth, keys))
        if firsts <= {b"0", b"1"} and any(thirteenth) and are_short and not are_keys:
            found = f"a label and {_UNLABELED - 1} other columns: the last is missing"
    if found:
        raise UserError(
            f"{found}; Criteo logs have 40 (label, I1..I13, C1..C26), or 39 without label, separated by tabs; "
            "describe other logs with `schema`"
        )
    return criteo_schema(labeled=labeled >= unlabeled)


def read_schema(path: Path) -> LogSchema:
    """Read a schema file.

    Raises:
        ValueError: the file is missing or not TOML, or has a key or value other than the module's example shows.
    """
    if not path.is_file():
        raise UserError(f"`schema` {path} does not exist; check its name")
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))  # TOML is UTF-8, whatever the locale
        return _schema(content)
    except (ValueError, TypeError) as error:
        raise UserError(f"`schema` {path}: {error}") from error


def _schema(content: Mapping[str, Any]) -> LogSchema:
    _refuse_unknown(content, {"format", "separator", "header", "missing", "columns"})
    columns = content.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise UserError('it needs a table [columns] with lines such as price = "integer"')
    separator = _byte(content.get("separator", "," if content.get("format") == "csv" else "\t"), refused='\r\n-".')
    header, missing = content.get("header", False), content.get("missing", [])
    if not isinstance(header, bool):
        raise UserError(f"header is {header!r}; write true or false, without quotes")
    if not isinstance(missing, list) or not all(isinstance(text, str) and text for text in missing):
        raise UserError(f'missing is {missing!r}; write a list of texts, such as ["NA", "NaN"]')
    schema = LogSchema(
        columns=tuple(_column(name, entry) for name, entry in columns.items()),
        separator=separator,
        format=_one_of("format", content.get("format", "csv" if separator == "," else "text"), Format),
        header=header,
        missing=tuple(missing),
    )
    kinds: tuple[tuple[Kind, str], ...] = (("weight", "weights"), ("time", "times"))
    for kind, plural in kinds:
        if len(schema.of_kind(kind)) > 1:
            names = ", ".join(schema.of_kind(kind))
            raise UserError(f"columns {names} are all {plural}; there can be only one, so ignore the others")
    if not schema.integers + schema.categories:
        raise UserError("no column is a number or category; there is nothing to learn from")
    for column in schema.columns:
        if not column.name and column.kind != "ignore":
            raise UserError("a column's name is empty; give the column a name, in the log and here, or ignore it")
        if column.name == LABEL and column.kind not in ("ignore", "label", "time"):
            raise UserError(f"column {LABEL} is of kind {column.kind}; the name is reserved for the label, so choose another one")
        if len(file_name(column.name).encode()) > _LONGEST_NAME:
            raise UserError(f"column {column.name[:40]}... has a name that is too long for its files; rename it")
        if column.kind == "list" and column.separator == schema.separator:
            raise UserError(f"{column.name}: {column.separator!r} cannot separate both columns and elements")
    return schema


def file_name(column: str) -> str:
    """Convert a column's name to a file name, escaping characters that have a meaning in paths."""
    return re.sub(r"[%/\\\0]|^\.", lambda match: f"%{ord(match[0]):02X}", column)


def _column(name: str, entry: object) -> Column:
    settings = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(settings, dict):
        raise UserError(f"{name}: write its kind, one of {', '.join(get_args(Kind))}")
    kind = settings.get("kind")
    if kind not in get_args(Kind):
        raise UserError(f"{name}: kind {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
    allowed = {"kind", "column"} | ({"transform"} if kind in _NUMBERS else set())
    allowed |= {"hash_buckets"} if kind in _CATEGORIES else set()
    allowed |= {"separator", "max_length"} if kind == "list" else set()
    _refuse_unknown(settings, allowed, f"{name}: ")
    for setting, least in (("hash_buckets", 2), ("max_length", 1)):
        number = settings.get(setting, least)
        if type(number) is not int or not least <= number <= 1 << 31:
            raise UserError(f"{name}: {setting} is {number!r}; it must be an integer from {least} to 2**31")
    if not isinstance(settings.get("column", ""), str):
        raise UserError(f"{name}: column is {settings['column']!r}; write the name that the log gives it")
    transform = _one_of(f"{name}: transform", settings.get("transform", "log"), Transform)
    others = {name: value for name, value in settings.items() if name not in ("separator", "transform")}
    separator = _byte(settings.get("separator", "|"))
    return Column(name=name, separator=separator, transform=transform, **others)


def _one_of(setting: str, value: object, choices: Any) -> Any:
    if value not in get_args(choices):
        raise UserError(f"{setting} {value!r} is unknown; choose one of {', '.join(get_args(choices))}")
    return value


def _byte(separator: object, refused: str = '\r\n-"') -> str:
    if (
        not isinstance(separator, str)
        or len(separator) != 1
        or not separator.isascii()
        or separator in refused
        or separator.isalnum()
    ):
        raise UserError(f"separator {separator!r} must be one ASCII character, not a letter, a digit or one of {refused!r}")
    return separator


def _refuse_unknown(content: Mapping[str, Any], known: set[str], where: str = "") -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise UserError(f"{where}{unknown[0]} is unknown; choose from {', '.join(sorted(known))}")
