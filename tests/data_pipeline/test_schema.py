"""Every mistake in a schema file gives one line that names the file, the column and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_pipeline.schema import read_schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[columns", "Expected"),
        ("[columns]\n", "it needs a table [columns]"),
        ("colums = 1", "colums is unknown; choose from columns, format, header, missing, separator"),
        ('[columns]\na = "number"', "a: kind 'number' is unknown; choose one of ignore, label, integer, hex, category, list"),
        (
            '[columns]\na = { kind = "list", sep = "|" }',
            "a: sep is unknown; choose from column, hash_buckets, kind, max_ids, max_length",
        ),
        ("[columns]\na = 3", "a: write its kind, one of ignore"),
        ('[columns]\na = "weight"\nb = "weight"', "columns a, b are all weights; there can be only one"),
        ('header = "false"\n[columns]\na = "integer"', "header is 'false'; write true or false, without quotes"),
        (f'[columns]\n{"a" * 200} = "integer"', "aaaaa... has a name that is too long for its files; rename it"),
        ('format = "xml"\n[columns]\na = "integer"', "format 'xml' is unknown; choose one of text, csv, jsonl"),
        (
            '[columns]\na = { kind = "float", transform = "sqrt" }',
            "a: transform 'sqrt' is unknown; choose one of log, stan",
        ),
        (
            '[columns]\na = { kind = "hex", transform = "log" }',
            ": transform is unknown; choose from column, hash_buckets",
        ),
        ('[columns]\na = { kind = "hex", hash_buckets = 1 }', "a: hash_buckets is 1; it must be an integer from 2 to 2**31"),
        ('[columns]\na = { kind = "list", max_length = true }', "a: max_length is True; it must be an integer from 1"),
        (
            '[columns]\na = { kind = "hex", hash_buckets = 9, max_ids = 3 }',
            "a: max_ids limits a vocabulary, which hash_buckets replaces",
        ),
        ('missing = "NA"\n[columns]\na = "hex"', "missing is 'NA'; write a list of texts"),
        ('[columns]\na = { kind = "time", format = "ISO" }\nb = "hex"', "a: format is 'ISO'; write it as for strptime"),
        ('[columns]\na = "label"', "there is nothing to learn from"),
        ('[columns]\n"" = "integer"', "a column's name is empty"),
        ('[columns]\nlabel = "integer"', "column label is of kind integer; the name is reserved for the label"),
        (
            'separator = "."\n[columns]\na = "integer"',
            r"separator '.' must be one ASCII character, not a letter, a digit or one of",
        ),
        ('separator = "|"\n[columns]\na = "list"', "a: '|' cannot separate both columns and elements"),
    ],
)
def test_bad_schemas(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=r"^`schema` .*schema.toml: .*" + re.escape(message)):
        read_schema(tmp_path / "schema.toml")
