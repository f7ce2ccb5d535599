"""What a log holds: its columns, each of one kind, and how they are written.

    format = "csv"                 # "text": nothing is quoted; "jsonl": an object a line. Parquet says itself what it is
    separator = ","                # the default of "csv"; of others the tab
    header = true                  # each log opens with a line of names, by which its columns are known; else by their order
    [columns]
    click = "label"                # 0 or 1; written as `label`, or by their names where there are several
    shop = "category"              # any text or integers, kept as a 64-bit hash
    price_cents = "integer"        # 32 bits; "int64" and "float" are others
    tags = { kind = "list", separator = " ", max_length = 20 }
    user = { kind = "category", column = "user_id", hash_buckets = 100_000 }
    rating = { kind = "float", transform = "standardize" }
    age = { kind = "integer", transform = "bucketize", boundaries = [18, 30, 60] }   # ids of ranges; buckets = 8 for quantiles
    importance = "weight"          # of the row in a loss
    at = "time"                    # not written; `--split time` goes by it, `--split user` by a column of kind "user"

Criteo's own columns are built in: label, counts I1..I13, categories C1..C26 of 1 to 8 hex digits ("hex").
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data_pipeline.columns import CATEGORIES, INTEGERS, LABEL

Kind = Literal["ignore", "label", "integer", "hex", "category", "list", "int64", "float", "weight", "time", "user"]
KINDS = ("ignore", "label", "integer", "hex", "category", "list")  # that `parse` reads
Transform = Literal["log", "standardize", "bucketize", "none"]
Format = Literal["text", "csv", "jsonl"]
OF_NO_FEATURE: tuple[Kind, ...] = ("ignore", "label", "weight", "time", "user")
_NUMBERS: tuple[Kind, ...] = ("integer", "int64", "float")
_CATEGORIES: tuple[Kind, ...] = ("hex", "category", "list")
_LONGEST_NAME = 150  # in bytes; file systems take 255, and what is not finished has longer names
_UNLABELLED = len(INTEGERS) + len(CATEGORIES)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a log.

    Args:
        name: of the column in the data set.
        kind: what a cell holds.
        separator: stands between the elements of a list.
        column: its name in logs that name their columns; "" for the same name.
        transform: of a number: log(x + offset), (x - mean) / standard deviation, x itself, or "bucketize": a category of ranges,
            with ids 1 + how many boundaries are at most x.
        boundaries: of the ranges, ascending; or
        buckets: how many ranges of about equally many training values.
        hash_buckets: a category's ids are 1..hash_buckets - 1 by hash; None for a vocabulary.
        max_ids: a category's vocabulary keeps this many values at most, the most frequent.
        max_length: a list keeps this many elements at most, the first.
    """

    name: str
    kind: Kind
    separator: str = "|"
    column: str = ""
    transform: Transform = "log"
    hash_buckets: int | None = None
    max_ids: int | None = None
    max_length: int | None = None
    boundaries: tuple[float, ...] = ()
    buckets: int | None = None

    @property
    def bucketized(self) -> bool:
        """Whether it is a number whose range is its category."""
        return self.kind in _NUMBERS and self.transform == "bucketize"

    @property
    def source(self) -> str:
        """The name in logs that name their columns."""
        return self.column or self.name


@dataclass(frozen=True, kw_only=True)
class LogSchema:
    """The columns in the order of a line, the byte between them, and whether each file opens with a line of names.

    transformed: the integer columns are float32 to be kept as they are, as in the .npy files of torchrec's scripts.
    """

    columns: tuple[Column, ...]
    separator: str = "\t"
    header: bool = False
    transformed: bool = False
    format: Format = "text"

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """Names of the columns of these kinds, in the order of a line."""
        return tuple(column.name for column in self.columns if column.kind in kinds)

    @property
    def labelled(self) -> bool:
        return bool(self.of_kind("label"))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels in the data set: `label` where there is one, else the names in the log."""
        names = self.of_kind("label")
        return (LABEL,) if len(names) == 1 else names

    @property
    def weight(self) -> str | None:
        """The column of the rows' weights."""
        return next(iter(self.of_kind("weight")), None)

    @property
    def integers(self) -> tuple[str, ...]:
        """Columns of numbers of all kinds, but for those whose ranges are categories."""
        return tuple(column.name for column in self.columns if column.kind in _NUMBERS and not column.bucketized)

    @property
    def number_dtype(self) -> np.dtype:
        """Of numbers as they are parsed."""
        if self.transformed:
            return np.dtype(np.float32)
        columns = [self.column_of(name) for name in self.integers]
        wide = any(column.kind in ("int64", "float") or column.transform == "standardize" for column in columns)
        return np.dtype(np.float64 if wide else np.int32)

    @property
    def of_text(self) -> bool:
        """Whether `parse` reads columns of these kinds."""
        return self.format != "jsonl" and all(column.kind in KINDS and not column.bucketized for column in self.columns)

    def column_of(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def singles(self) -> tuple[str, ...]:
        """Categorical columns of one value a line."""
        return tuple(column.name for column in self.columns if column.kind in ("hex", "category") or column.bucketized)

    @property
    def lists(self) -> tuple[str, ...]:
        """Categorical columns of any number of values a line."""
        return self.of_kind("list")

    @property
    def categories(self) -> tuple[str, ...]:
        """Singles before lists, the order in which everything else counts them."""
        return self.singles + self.lists

    @property
    def key_dtype(self) -> np.dtype:
        """Of category values: hex digits are 32-bit numbers, everything else takes 64 bits, most of it hashed."""
        wide = self.of_kind("category", "list") or any(column.bucketized for column in self.columns)
        return np.dtype(np.uint64 if wide else np.uint32)


def criteo_schema(*, labelled: bool) -> LogSchema:
    """Criteo's columns."""
    label = [Column(name=LABEL, kind="label")] if labelled else []
    integers = [Column(name=name, kind="integer") for name in INTEGERS]
    return LogSchema(columns=(*label, *integers, *(Column(name=name, kind="hex") for name in CATEGORIES)))


def detect_criteo_schema(text: bytes) -> LogSchema:
    """Criteo's columns with or without label, by the number of columns of most of a log's first lines.

    Raises:
        ValueError: no line has 40 or 39 columns.
    """
    counts = Counter(line.count(b"\t") + 1 for line in text.split(b"\n", 100)[:100])
    labelled, unlabelled = counts[_UNLABELLED + 1], counts[_UNLABELLED]
    if not labelled and not unlabelled:
        columns = counts.most_common(1)[0][0]
        raise ValueError(
            f"{columns} columns; Criteo logs have 40 (label, I1..I13, C1..C26), or 39 without label, separated by tabs; "
            "describe other logs with --schema"
        )
    return criteo_schema(labelled=labelled >= unlabelled)


def read_schema(path: Path) -> LogSchema:
    """Read a schema file.

    Raises:
        ValueError: it is no TOML, or a key or value in it is not as the module's example shows.
    """
    if not path.is_file():
        raise ValueError(f"--schema {path} does not exist; check its name")
    try:
        content = tomllib.loads(path.read_text())
        return _schema(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--schema {path}: {error}") from error


def _schema(content: Mapping[str, Any]) -> LogSchema:
    _refuse_unknown(content, {"format", "separator", "header", "columns"})
    columns = content.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise ValueError('it has no table [columns] of lines such as price = "integer"')
    separator = _byte(content.get("separator", "," if content.get("format") == "csv" else "\t"), refused='\r\n-".')
    schema = LogSchema(
        columns=tuple(_column(name, entry) for name, entry in columns.items()),
        separator=separator,
        format=_one_of("format", content.get("format", "csv" if separator == "," else "text"), Format),
        header=_flag(content.get("header", False)),
    )
    kinds: tuple[tuple[Kind, str], ...] = (("weight", "weights"), ("time", "times"), ("user", "users"))
    for kind, plural in kinds:
        if len(schema.of_kind(kind)) > 1:
            raise ValueError(f"columns {', '.join(schema.of_kind(kind))} are all {plural}; there can be one")
    if schema.of_kind("time") and schema.of_kind("user"):
        raise ValueError("one column is of kind time and one of kind user; rows are split by one of them, so ignore the other")
    if not schema.integers + schema.categories:
        raise ValueError("no column is a number or category; there is nothing to learn from")
    for column in schema.columns:
        if column.name == LABEL and column.kind not in ("ignore", "label", "time", "user"):
            raise ValueError(f"column {LABEL} is of kind {column.kind}; the name is kept for the label, so give it another one")
        if len(file_name(column.name).encode()) > _LONGEST_NAME:
            raise ValueError(f"column {column.name[:40]}... has too long a name for its files; rename it")
        if column.kind == "list" and column.separator == schema.separator:
            raise ValueError(f"{column.name}: {column.separator!r} cannot separate both columns and elements")
    return schema


def file_name(column: str) -> str:
    """A column's name as that of a file: as it is, but for characters that have a meaning in paths."""
    return re.sub(r"[%/\\\0]|^\.", lambda match: f"%{ord(match[0]):02X}", column)


def _column(name: str, entry: object) -> Column:
    settings = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(settings, dict):
        raise ValueError(f"{name}: write its kind, one of {', '.join(get_args(Kind))}")
    kind = settings.get("kind")
    if kind not in get_args(Kind):
        raise ValueError(f"{name}: kind {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
    allowed = {"kind", "column"} | ({"transform", "boundaries", "buckets"} if kind in _NUMBERS else set())
    allowed |= {"hash_buckets", "max_ids"} if kind in _CATEGORIES else set()
    _refuse_unknown(settings, allowed | ({"separator", "max_length"} if kind == "list" else set()))
    for setting, least in (("hash_buckets", 2), ("max_ids", 1), ("max_length", 1), ("buckets", 2)):
        number = settings.get(setting, least)
        if type(number) is not int or not least <= number <= 1 << 31:
            raise ValueError(f"{name}: {setting} is {number!r}; it must be an integer from {least} to 2**31")
    if not isinstance(settings.get("column", ""), str):
        raise ValueError(f"{name}: column is {settings['column']!r}; write the name that the log gives it")
    if "hash_buckets" in settings and "max_ids" in settings:
        raise ValueError(f"{name}: hash_buckets leave no vocabulary for max_ids to bound; give one of them")
    transform = _one_of(f"{name}: transform", settings.get("transform", "log"), Transform)
    if len({"boundaries", "buckets"} & settings.keys()) != (transform == "bucketize"):
        raise ValueError(f'{name}: transform = "bucketize" takes either boundaries or a number of buckets; others take neither')
    boundaries = _boundaries(name, settings["boundaries"]) if "boundaries" in settings else ()
    others = {name: value for name, value in settings.items() if name not in ("separator", "transform", "boundaries")}
    separator = _byte(settings.get("separator", "|"))
    return Column(name=name, separator=separator, transform=transform, boundaries=boundaries, **others)


def _boundaries(name: str, given: object) -> tuple[float, ...]:
    numbers = [float(number) for number in given if type(number) in (int, float)] if isinstance(given, list) else []
    if not numbers or given != numbers or not all(low < high for low, high in itertools.pairwise([-math.inf, *numbers, math.inf])):
        raise ValueError(f"{name}: boundaries are {given!r}; they must be finite numbers, each above the one before")
    return tuple(numbers)


def _one_of(setting: str, value: object, choices: Any) -> Any:
    if value not in get_args(choices):
        raise ValueError(f"{setting} {value!r} is unknown; choose one of {', '.join(get_args(choices))}")
    return value


def _flag(header: object) -> bool:
    if not isinstance(header, bool):
        raise ValueError(f"header is {header!r}; write true or false, without quotes")
    return header


def _byte(separator: object, refused: str = '\r\n-"') -> str:
    if (
        not isinstance(separator, str)
        or len(separator) != 1
        or not separator.isascii()
        or separator in refused
        or separator.isalnum()
    ):
        raise ValueError(f"separator {separator!r} must be one ASCII character, but no letter, no digit and none of {refused!r}")
    return separator


def _refuse_unknown(content: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"{unknown[0]} is unknown; known are {', '.join(sorted(known))}")
