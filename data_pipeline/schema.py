"""What a line of a log holds: its columns in order, each of one kind, and the byte between them.

    separator = ","
    header = true
    [columns]                      # in the order of a line
    id = "ignore"
    click = "label"                # 0 or 1; written as `label`
    hour = "category"              # any text, kept as a 64-bit hash
    price_cents = "integer"        # 32 bits
    tags = { kind = "list", separator = "|" }

Criteo's own columns are built in: label, counts I1..I13, categories C1..C26 of 1 to 8 hex digits ("hex").
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data_pipeline.columns import CATEGORIES, INTEGERS, LABEL

Kind = Literal["ignore", "label", "integer", "hex", "category", "list"]
KINDS: tuple[str, ...] = get_args(Kind)
_LONGEST_NAME = 150  # in bytes; file systems take 255, and what is not finished has longer names
_UNLABELLED = len(INTEGERS) + len(CATEGORIES)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a log; `separator` stands between the elements of a list."""

    name: str
    kind: Kind
    separator: str = "|"


@dataclass(frozen=True, kw_only=True)
class LogSchema:
    """The columns of a line in order, the byte between them, and whether each file opens with a line of names.

    transformed: the integer columns are float32 to be kept as they are, as in the .npy files of torchrec's scripts.
    """

    columns: tuple[Column, ...]
    separator: str = "\t"
    header: bool = False
    transformed: bool = False

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """Names of the columns of these kinds, in the order of a line."""
        return tuple(column.name for column in self.columns if column.kind in kinds)

    @property
    def labelled(self) -> bool:
        return bool(self.of_kind("label"))

    @property
    def integers(self) -> tuple[str, ...]:
        return self.of_kind("integer")

    @property
    def singles(self) -> tuple[str, ...]:
        """Categorical columns of one value a line."""
        return self.of_kind("hex", "category")

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
        """Of category values: hex digits are 32-bit numbers, everything else is hashed to 64 bits."""
        return np.dtype(np.uint64 if self.of_kind("category", "list") else np.uint32)


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
        found = counts.most_common(1)[0][0]
        raise ValueError(
            f"{found} columns; Criteo logs have 40 (label, I1..I13, C1..C26), or 39 without label, separated by tabs; "
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
    _refuse_unknown(content, {"separator", "header", "columns"})
    columns = content.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise ValueError('it has no table [columns] of lines such as price = "integer"')
    schema = LogSchema(
        columns=tuple(_column(name, entry) for name, entry in columns.items()),
        separator=_byte(content.get("separator", "\t")),
        header=_flag(content.get("header", False)),
    )
    if len(schema.of_kind("label")) > 1:
        raise ValueError(f"columns {', '.join(schema.of_kind('label'))} are all labels; there can be one")
    if not schema.integers + schema.categories:
        raise ValueError("no column is an integer, hex, category or list; there is nothing to learn from")
    for column in schema.columns:
        if column.kind not in ("label", "ignore") and column.name == LABEL:
            raise ValueError(f"column {LABEL} is of kind {column.kind}; the name is kept for the label")
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
        raise ValueError(f"{name}: write its kind, one of {', '.join(KINDS)}")
    _refuse_unknown(settings, {"kind", "separator"})
    if settings.get("kind") not in KINDS:
        raise ValueError(f"{name}: kind {settings.get('kind')!r} is unknown; choose one of {', '.join(KINDS)}")
    return Column(name=name, kind=settings["kind"], separator=_byte(settings.get("separator", "|")))


def _flag(header: object) -> bool:
    if not isinstance(header, bool):
        raise ValueError(f"header is {header!r}; write true or false, without quotes")
    return header


def _byte(separator: object) -> str:
    if (
        not isinstance(separator, str)
        or len(separator) != 1
        or not separator.isascii()
        or separator in "\r\n-"
        or separator.isalnum()
    ):
        raise ValueError(f"separator {separator!r} must be one ASCII character other than letters, digits, '-' and line ends")
    return separator


def _refuse_unknown(content: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"{unknown[0]} is unknown; known are {', '.join(sorted(known))}")
