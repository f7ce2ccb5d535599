"""Column names that logs state themselves, checked before anything is read or written."""

from __future__ import annotations

import csv
from collections import Counter

from data_pipeline.parts import parquet_names, read_first_line
from data_pipeline.schema import LogSchema
from data_pipeline.sources import Source
from data_pipeline.tables import read_names


def names_of(log: Source, schema: LogSchema) -> tuple[str, ...] | None:
    """Return a log's column names, in its order; None if columns are identified by position or named in each JSON line.

    Raises:
        ValueError: the log can't be read, or its first line isn't CSV.
    """
    names = parquet_names(log)
    if names is None and schema.header and schema.format != "jsonl":
        try:
            names = read_names(read_first_line(log), schema)
        except csv.Error as error:  # Python's message advises opening the file in another way
            reason = "has a carriage return within it" if "new-line" in str(error) else f"is not CSV ({error})"
            raise ValueError(f"the line of column names of {log} {reason}; correct it, or set header = false") from None
    return names


def check_names(log: Source, schema: LogSchema) -> tuple[str, ...] | None:
    """Do what `names_of` does, and check that the log has every column of the schema exactly once.

    Raises:
        ValueError: a column is missing or appears more than once.
    """
    names = names_of(log, schema)
    counts = Counter(names)
    for column in schema.columns:
        if names is not None and column.kind != "ignore" and counts[column.source] != 1:
            number = "more than one column" if counts[column.source] else "no column"
            shown = ", ".join(repr(name)[1:-1] for name in names)  # escaped: names may contain line breaks
            raise ValueError(f"{log} has {number} {column.source!r}; its columns are {shown[:200]}; correct the schema or the log")
    return names
