"""Inspection of data sets: a table of their columns, and single ids with their texts.

A vocabulary stores hex digits as numbers and other texts as 64-bit hashes. So the id of any text can be looked up, but only hex
digits can be recovered from an id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data_pipeline.errors import UserError
from data_pipeline.hashing import IdSource, encode_keys
from data_pipeline.manifest import CategoricalColumn, Manifest, check_file
from data_pipeline.reference import hash_text
from data_pipeline.schema import Kind

TOP = (1, 10, 100, 1_000, 10_000)
_HEX = re.compile(r"[0-9a-fA-F]{1,8}")


def to_text(manifest: Manifest, folder: Path) -> str:
    """Format aligned tables of the splits and the columns.

    `top k` is the share of the training split's values that have one of the first k ids, where values without an id count as not
    covered. `Zipf s` is the best s for count ~ rank^-s, by least squares of logarithms at ranks 1, 2, 4, ... Both are left out if
    another data set's vocabularies encoded this one. `0 in test` is the share of the test split's ids that are 0.

    Raises:
        ValueError: a vocabulary is missing, or its size differs from the manifest's.
    """
    lines = []
    for name, split in manifest.splits.items():
        rates = [f"  {label.name} rate {label.split_means[name]:.4f}" for label in manifest.labels if split.rows]
        lines.append(f"{name:<6} {split.rows:>14,} rows" + "".join(rates))
    rows = [["integer", "missing", "min", "max"]]
    for integer in manifest.integer_columns:
        rows.append([integer.name, f"{integer.missing / manifest.rows.written:.1%}", _number(integer.min), _number(integer.max)])
    lines += ["", *_aligned(rows)] if len(rows) > 1 else []
    rows = [["category", "distinct", "ids", "missing", "0 in test", *(f"top {k:,}" for k in TOP), "Zipf s"]]
    test = manifest.splits["test"].rows
    for column in manifest.categorical_columns:
        zeros = f"{column.rows_at_zero['test'] / test:.1%}" if test and not column.is_list else ""
        missing = f"{column.missing / manifest.rows.written:.1%}"
        counts = np.empty(0, np.int64)
        if column.vocabulary and not manifest.transformed:
            counts = pq.read_table(check_file(column.vocabulary, folder), columns=["count"]).column("count").to_numpy()
        cells = [column.name, _number(column.distinct), f"{column.num_embeddings:,}", missing, zeros]
        rows.append([*cells, *_coverage(counts, column.rows_at_zero["train"]), _exponent(counts)])
    return "\n".join(lines + (["", *_aligned(rows)] if len(rows) > 1 else []))


def _coverage(counts: np.ndarray, zeros: int) -> list[str]:
    covered = np.cumsum(counts)
    return [f"{covered[min(k, len(covered)) - 1] / (covered[-1] + zeros):.1%}" if len(covered) else "" for k in TOP]


def _exponent(counts: np.ndarray) -> str:
    ranks = 2 ** np.arange(len(counts).bit_length())
    if len(ranks) < 3:
        return ""
    return f"{-np.polyfit(np.log(ranks), np.log(np.sort(counts)[::-1][ranks - 1]), 1)[0]:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An id of a column, its text, and how many training rows (or elements of their lists) hold it.

    text and count are None for id 0, which missing, rare and new values share; count is also None if values were not counted.
    """

    column: str
    id: int
    text: str | None
    count: int | None


def find_id(manifest: Manifest, folder: Path, column: str, number: int) -> Entry:
    """Find an id's text.

    Raises:
        ValueError: there is no such column or id, or the data set doesn't store the column's texts.
    """
    kind, described = _column(manifest, folder, column)
    if not 0 <= number < described.num_embeddings:
        raise UserError(f"`id` is {number}; ids of {column} are 0 to {described.num_embeddings - 1}")
    if not number:
        return Entry(column=column, id=0, text=None, count=None)
    if not described.vocabulary:
        raise UserError(f"ids of {column} are hashes, each shared by many texts; ask for the id of a text with `text`")
    if kind != "hex":
        raise UserError(f"the vocabulary of {column} stores hashes of texts, not texts; ask for the id of a text with `text`")
    value, count = _entry(described, folder, number)
    return Entry(column=column, id=number, text=f"{value:08x}", count=count)


def find_text(manifest: Manifest, folder: Path, column: str, text: str) -> Entry:
    """Find a text's id, 0 if it has none.

    Raises:
        ValueError: there is no such column, or the text can't be one of its values.
    """
    kind, described = _column(manifest, folder, column)
    schema = manifest.log
    if not text or text in schema.missing:
        return Entry(column=column, id=0, text=None, count=None)
    if kind == "hex" and not _HEX.fullmatch(text):
        raise UserError(f"`text` is {text!r}; values of {column} are 1 to 8 hex digits")
    keys = np.array([[int(text, 16) if kind == "hex" else hash_text(text.encode("utf-8", "surrogateescape"))]], schema.key_dtype)
    table = check_file(described.table, folder) if described.table else None
    id_source = IdSource(table, schema.key_dtype, buckets=0 if table else described.num_embeddings)
    ids, _ = encode_keys([id_source], keys, np.zeros((1, 1), np.bool_))
    number = int(ids[0, 0])
    count = _entry(described, folder, number)[1] if described.vocabulary and number else None
    return Entry(column=column, id=number, text=text, count=count)


def _column(manifest: Manifest, folder: Path, name: str) -> tuple[Kind, CategoricalColumn]:
    described = {column.name: column for column in manifest.categorical_columns}
    if name not in described:
        raise UserError(f"`column` {name}: {folder} has no such categorical column; choose one of {', '.join(described)[:200]}")
    return manifest.log.column_of(name).kind, described[name]


def _entry(column: CategoricalColumn, folder: Path, number: int) -> tuple[int, int]:
    """Read the value and count of an id, from 1, in the vocabulary."""
    assert column.vocabulary, "only columns with a vocabulary have entries"
    with pq.ParquetFile(check_file(column.vocabulary, folder), memory_map=True) as file:
        row, group = number - 1, 0
        while row >= (rows := file.metadata.row_group(group).num_rows):
            row, group = row - rows, group + 1
        entry = file.read_row_group(group).slice(row, 1).to_pylist()[0]
    return entry["value"], entry["count"]
