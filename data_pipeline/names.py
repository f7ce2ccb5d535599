"""Logs that name their columns: what they are, before anything is read or written."""

from __future__ import annotations

import csv
from collections import Counter

from data_pipeline.parts import parquet_names, read_first_line
from data_pipeline.schema import LogSchema
from data_pipeline.sources import Source
from data_pipeline.tables import read_names


def names_of(log: Source, schema: LogSchema) -> tuple[str, ...] | None:
    """The names of a log's columns, in its order; None where columns are known by their order, or by each line of JSON.

    Raises:
        ValueError: the log can't be read, or its first line isn't CSV.
    """
    names = parquet_names(log)
    if names is None and schema.header and schema.format != "jsonl":
        try:
            names = read_names(read_first_line(log), schema)
        except csv.Error as error:  # Python advises to open the file in another way
            reason = "has a carriage return within" if "new-line" in str(error) else f"is not CSV ({error})"
            raise ValueError(f"the line of column names of {log} {reason}; mend it, or set header = false") from None
    return names


def check_names(log: Source, schema: LogSchema) -> tuple[str, ...] | None:
    """As `names_of`, after making sure that the log has every column of the schema once.

    Raises:
        ValueError: it lacks one, or has two of that name.
    """
    names = names_of(log, schema)
    counts = Counter(names)
    for column in schema.columns:
        if names is not None and column.kind != "ignore" and counts[column.source] != 1:
            number = "two columns" if counts[column.source] else "no column"
            shown = ", ".join(repr(name)[1:-1] for name in names)  # a name may hold characters that break the line
            raise ValueError(f"{log} has {number} {column.source!r}; its columns are {shown[:200]}")
    return names
