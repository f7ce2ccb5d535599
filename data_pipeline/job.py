"""State that both passes share: options, schema and work folder, and how parts are read and parsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from data_pipeline.manifest import SPLITS
from data_pipeline.options import PassOptions
from data_pipeline.parse import Parsed, truncate_lists
from data_pipeline.parts import Part, Skip, parquet_names, read_parts
from data_pipeline.schema import LogSchema
from data_pipeline.sources import LogIdentity
from data_pipeline.splits import Splitting
from data_pipeline.tables import BOM, Layout, table_blocks, text_blocks
from data_pipeline.work import WorkFolder


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run over logs.

    layouts: each log's column names or types, as `data_pipeline.parts.check_layout` returns them.
    counted: numbers of the categorical columns whose values pass 1 counts.
    """

    options: PassOptions
    schema: LogSchema
    logs: tuple[LogIdentity, ...]
    work: WorkFolder
    splitting: Splitting
    layouts: tuple[Layout | None, ...]
    counted: frozenset[int] = frozenset()

    def parts(self, log: int, skip: Skip) -> Iterator[Part]:
        """Read a log's parts with `read_parts`."""
        columns = {column.source for column in self.schema.columns if column.kind != "ignore"}
        return read_parts(log, self.options.inputs[log], part_bytes=self.options.part_bytes, skip=skip, columns=columns)

    def blocks(self, part: Part) -> Iterator[Parsed]:
        """Parse a part block by block, without a header line; `starts` are positions in the whole log."""
        if isinstance(part.content, pa.Table):
            blocks = table_blocks(part.content, self.schema)
        else:
            begin = 0
            if not part.start:
                begin = part.content.find(b"\n") + 1 if self._has_header() else len(BOM) * part.content.startswith(BOM)
            blocks = text_blocks(part.content, self.schema, self._arrow_layout(part, begin), begin=begin)
        for parsed in blocks:
            yield truncate_lists(replace(parsed, starts=parsed.starts + part.start), self.schema)

    def _has_header(self) -> bool:
        return self.schema.header and self.schema.format != "jsonl"

    def _arrow_layout(self, part: Part, begin: int) -> Layout | None:
        """Return the layout of a text that Arrow must read; None if `data_pipeline.parse` can."""
        content, layout = part.content, self.layouts[part.log]
        names = tuple(column.source for column in self.schema.columns)
        is_plain = self.schema.format != "csv" or not (_has_lone_returns(content) or content.find(b'"', begin) >= 0)
        return None if self.schema.is_plain_text and is_plain and layout in (None, names) else layout or names

    def first_line(self, log: int) -> int:
        """Return the line number of a log's first row: 2 after a header line, else 1."""
        return 2 if self._has_header() and parquet_names(self.options.inputs[log]) is None else 1

    def rows_by_draw(self, part: Part, parsed: Parsed) -> dict[str, np.ndarray]:
        """Return each split's rows of a parsed block, if splits don't go by position."""
        splitting = self.splitting
        if splitting.split == "random":
            drawn = splitting.drawn(part.log, parsed.starts)
        else:
            assert parsed.times is not None, "`Splitting.schema_used` has been called"
            bounds = np.array([splitting.val_from, splitting.test_from], np.float64)
            drawn = np.searchsorted(bounds, parsed.times, side="right")
        return {name: np.flatnonzero(drawn == number) for number, name in enumerate(SPLITS)}


def _has_lone_returns(text: bytearray) -> bool:
    returns = text.count(b"\r")
    return returns > 0 and returns != text.count(b"\r\n")  # a slow search, which most texts are spared


def part_name(log: int, number: int) -> str:
    """Return the name of a part's files in the work folder."""
    return f"{log:05d}-{number:06d}"
