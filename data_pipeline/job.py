"""What both passes share: the options, the logs' schema, the work folder, and how a part is read and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.options import PassOptions
from data_pipeline.parse import Parsed, parse_blocks
from data_pipeline.parts import Part, Skip, read_parts
from data_pipeline.schema import LogSchema
from data_pipeline.sources import LogIdentity
from data_pipeline.splits import Splitting, rows_by_draw
from data_pipeline.triplets import Rows, parse_rows
from data_pipeline.work import WorkFolder


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run over logs.

    counts_values: whether pass 1 counts category values, for vocabularies.
    """

    options: PassOptions
    schema: LogSchema
    logs: tuple[LogIdentity, ...]
    work: WorkFolder
    splitting: Splitting
    counts_values: bool = False

    def reader(self, log: int, skip: Skip) -> Callable[[], Iterator[Part]]:
        """What reads a log's parts, as `read_parts`."""
        return lambda: read_parts(log, self.options.inputs[log], part_bytes=self.options.part_bytes, skip=skip)

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
        else:
            header = part.content.find(b"\n") + 1 if self.schema.header and not part.start else 0
            blocks, begin = parse_blocks(memoryview(part.content)[header:], self.schema), part.start + header
        for parsed in blocks:
            yield replace(parsed, starts=parsed.starts + begin)

    def rows_by_draw(self, part: Part, parsed: Parsed) -> dict[str, np.ndarray]:
        """The rows of each split in a part, where they are drawn."""
        return rows_by_draw(self.splitting.drawn(part.log, parsed.starts))


def part_name(log: int, number: int) -> str:
    """Of a part's files in the work folder."""
    return f"{log:05d}-{number:06d}"
