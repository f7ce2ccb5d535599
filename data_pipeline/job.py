"""What both passes share: the options, the logs' schema, the work folder, and how a part is read and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.lists import truncate_lists
from data_pipeline.options import PassOptions
from data_pipeline.parse import Parsed, parse_blocks
from data_pipeline.parts import Part, Skip, parquet_names, read_parts
from data_pipeline.schema import LogSchema
from data_pipeline.sources import LogIdentity
from data_pipeline.splits import Splitting, rows_by_draw
from data_pipeline.tables import table_blocks, text_blocks
from data_pipeline.triplets import Rows, parse_rows
from data_pipeline.work import WorkFolder


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run over logs.

    names: of each log's columns, in its order; None where they are known by their order.
    counted: numbers of the categorical columns whose values pass 1 counts, for vocabularies.
    """

    options: PassOptions
    schema: LogSchema
    logs: tuple[LogIdentity, ...]
    work: WorkFolder
    splitting: Splitting
    names: tuple[tuple[str, ...] | None, ...]
    counted: frozenset[int] = frozenset()

    def reader(self, log: int, skip: Skip) -> Callable[[], Iterator[Part]]:
        """What reads a log's parts, as `read_parts`."""
        columns = {column.source for column in self.schema.columns if column.kind != "ignore"}
        return lambda: read_parts(log, self.options.inputs[log], part_bytes=self.options.part_bytes, skip=skip, columns=columns)

    def blocks(self, part: Part) -> Iterator[Parsed]:
        """Parse a part, block by block, without the line of names where there is one; lines begin where they do in the whole log.

        Raises:
            ValueError: the log is of another kind than the first, or has other columns in .npy files.
        """
        columns = None
        if isinstance(part.content, Rows):
            columns = (part.content.dense.shape[1], part.content.sparse.shape[1])
        if columns != ((len(self.schema.integers), len(self.schema.singles)) if self.schema.transformed else None):
            raise ValueError(
                f"{self.options.inputs[part.log]} doesn't hold what the first --input or --schema says; text and .npy files, "
                "or .npy files of other columns, become data sets of their own"
            )
        if isinstance(part.content, Rows):
            blocks, begin = parse_rows(part.content), part.start
        elif isinstance(part.content, pa.Table):
            blocks, begin = table_blocks(part.content, self.schema), part.start
        else:
            header = part.content.find(b"\n") + 1 if self.schema.header and not part.start else 0
            blocks, begin = self._text_blocks(part.content, header, self.names[part.log]), part.start + header
        for parsed in blocks:
            yield truncate_lists(replace(parsed, starts=parsed.starts + begin), self.schema)

    def _text_blocks(self, content: bytearray, header: int, names: tuple[str, ...] | None) -> Iterator[Parsed]:
        by_order = tuple(column.source for column in self.schema.columns)
        is_quoted = self.schema.format == "csv" and content.find(b'"', header) >= 0
        text = memoryview(content)[header:]
        if self.schema.of_text and not is_quoted and names in (None, by_order):
            return parse_blocks(text, self.schema)
        return text_blocks(text, self.schema, names or by_order)

    def first_line(self, log: int) -> int:
        """The number of a log's first line or row, that of names left out."""
        return 2 if self.schema.header and parquet_names(self.options.inputs[log]) is None else 1

    def malformed(self, log: int, number: int, nth: int) -> tuple[int, str]:
        """The nth malformed line of a part, from 0: its number in the part, and what is wrong. Reads the part again."""
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
            rejected = sum(of_block for _, of_block in sizes)
            if nth < rejected:
                part = first
            else:
                part, nth, before = second, nth - rejected, before + sum(lines for lines, _ in sizes)

    def rows_by_draw(self, part: Part, parsed: Parsed) -> dict[str, np.ndarray]:
        """The rows of each split in a part, where they are drawn."""
        return rows_by_draw(self.splitting.of_rows(part.log, parsed.starts, parsed.split_keys))


def _halves(part: Part) -> tuple[Part, Part]:
    """A part of more than one line as two of about the same size."""
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
    """Of a part's files in the work folder."""
    return f"{log:05d}-{number:06d}"
