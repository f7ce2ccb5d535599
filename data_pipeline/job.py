"""State that both passes share: options, schema and work folder, and how parts are read and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.lists import truncate_lists
from data_pipeline.manifest import SPLITS
from data_pipeline.options import PassOptions
from data_pipeline.parse import Parsed, parse_blocks
from data_pipeline.parts import Part, Skip, parquet_names, read_parts
from data_pipeline.schema import LogSchema
from data_pipeline.sources import LogIdentity
from data_pipeline.splits import Splitting
from data_pipeline.tables import BOM, table_blocks, text_blocks
from data_pipeline.triplets import Rows, parse_rows
from data_pipeline.work import WorkFolder


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run over logs.

    names: each log's column names, in its order; None if columns are identified by position.
    counted: numbers of the categorical columns whose values pass 1 counts.
    """

    options: PassOptions
    schema: LogSchema
    logs: tuple[LogIdentity, ...]
    work: WorkFolder
    splitting: Splitting
    names: tuple[tuple[str, ...] | None, ...]
    counted: frozenset[int] = frozenset()

    def reader(self, log: int, skip: Skip) -> Callable[[], Iterator[Part]]:
        """Return a function that reads a log's parts with `read_parts`."""
        columns = {column.source for column in self.schema.columns if column.kind != "ignore"}
        return lambda: read_parts(log, self.options.inputs[log], part_bytes=self.options.part_bytes, skip=skip, columns=columns)

    def blocks(self, part: Part) -> Iterator[Parsed]:
        """Parse a part block by block, without a header line; `starts` are positions in the whole log.

        Raises:
            ValueError: only one of this log and the first is a set of .npy files, or their .npy files have different columns.
        """
        columns = None
        if isinstance(part.content, Rows):
            columns = (part.content.dense.shape[1], part.content.sparse.shape[1])
        if columns != ((len(self.schema.integers), len(self.schema.singles)) if self.schema.transformed else None):
            raise ValueError(
                f"{self.options.inputs[part.log]} doesn't match the first --input or --schema; preprocess text and .npy files, "
                "or .npy files with different columns, as separate data sets"
            )
        if isinstance(part.content, Rows):
            blocks, start = parse_rows(part.content), part.start
        elif isinstance(part.content, pa.Table):
            blocks, start = table_blocks(part.content, self.schema), part.start
        else:
            header = 0
            if not part.start:
                header = part.content.find(b"\n") + 1 if self._has_header() else len(BOM) * part.content.startswith(BOM)
            blocks, start = self._text_blocks(part.content, header, self.names[part.log]), part.start + header
        for parsed in blocks:
            yield truncate_lists(replace(parsed, starts=parsed.starts + start), self.schema)

    def _has_header(self) -> bool:
        return self.schema.header and self.schema.format != "jsonl"

    def _text_blocks(self, content: bytearray, header: int, names: tuple[str, ...] | None) -> Iterator[Parsed]:
        schema_names = tuple(column.source for column in self.schema.columns)
        has_lone_returns = content.count(b"\r") != content.count(b"\r\n")
        is_plain = self.schema.format != "csv" or not (has_lone_returns or content.find(b'"', header) >= 0)
        text = memoryview(content)[header:]
        if self.schema.is_plain_text and is_plain and names in (None, schema_names):
            return parse_blocks(text, self.schema)
        return text_blocks(text, self.schema, names or schema_names)

    def first_line(self, log: int) -> int:
        """Return the line number of a log's first row: 2 after a header line, else 1."""
        return 2 if self._has_header() and parquet_names(self.options.inputs[log]) is None else 1

    def malformed(self, log: int, number: int, nth: int) -> tuple[int, str]:
        """Read a part again to find its nth malformed line, from 0; return its number in the part, and what is wrong."""
        part, before = next(self.reader(log, number.__ne__)()), 0
        while True:
            rejected = 0
            for parsed in self.blocks(part):
                if nth < rejected + len(parsed.reasons):
                    line, reason = parsed.reasons[nth - rejected]
                    return before + line, reason
                rejected += parsed.rejected
                if nth < rejected:
                    break
            first, second = _halves(part)
            sizes = [(parsed.lines, parsed.rejected) for parsed in self.blocks(first)]
            rejected = sum(block_rejected for _, block_rejected in sizes)
            if nth < rejected:
                part = first
            else:
                part, nth, before = second, nth - rejected, before + sum(lines for lines, _ in sizes)

    def rows_by_draw(self, part: Part, parsed: Parsed) -> dict[str, np.ndarray]:
        """Return each split's rows of a parsed block, if splits don't go by position."""
        drawn = self.splitting.splits_of_rows(part.log, parsed.starts, parsed.split_keys)
        return {name: np.flatnonzero(drawn == number) for number, name in enumerate(SPLITS)}


def _halves(part: Part) -> tuple[Part, Part]:
    """Split a part of more than one line into two of about equal size."""
    content = part.content
    if isinstance(content, bytearray):
        middle = content.rfind(b"\n", 0, len(content) // 2) + 1 or content.find(b"\n") + 1
        halves: tuple[Any, Any] = (content[:middle], content[middle:])
    elif isinstance(content, pa.Table):
        middle = len(content) // 2
        halves = (content[:middle], content[middle:])
    else:
        middle = len(content.sparse) // 2
        halves = (Rows(*(array[:middle] for array in content)), Rows(*(array[middle:] for array in content)))
    return replace(part, content=halves[0]), replace(part, content=halves[1], start=part.start + middle)


def part_name(log: int, number: int) -> str:
    """Return the name of a part's files in the work folder."""
    return f"{log:05d}-{number:06d}"
