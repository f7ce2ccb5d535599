"""Division of Parquet logs into parts: several row groups that together fill a part, or a range of rows of a larger group.

The division depends only on the log's metadata. Reading the parts of a group in order decodes each row only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.sources import Source, open_log

MAGIC = b"PAR1"
_BATCH_ROWS = 1 << 16
_LEAST_CELL_BYTES = 8  # assumed of a decoded cell if its encoded form is smaller


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows of a part: `rows` rows of the groups after the first `skipped`; `start` is the number of the first in the log."""

    groups: range
    skipped: int
    rows: int
    start: int


def plan(metadata: pq.FileMetaData, part_bytes: int) -> list[Slice]:
    """Divide a log into parts."""
    slices: list[Slice] = []
    filled, start = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows = group.num_rows
        size = _size(group)
        parts_of_group = -(-size // part_bytes)
        if not rows:
            continue
        if parts_of_group > 1:
            step = max(1, -(-rows // parts_of_group))
            slices += [
                Slice(groups=range(number, number + 1), skipped=first, rows=min(step, rows - first), start=start + first)
                for first in range(0, rows, step)
            ]
            filled = part_bytes
        elif slices and filled + size <= part_bytes:
            last = slices[-1]
            slices[-1] = Slice(groups=range(last.groups.start, number + 1), skipped=0, rows=last.rows + rows, start=last.start)
            filled += size
        else:
            slices.append(Slice(groups=range(number, number + 1), skipped=0, rows=rows, start=start))
            filled = size
        start += rows
    return slices


def _size(group: pq.RowGroupMetaData) -> int:
    return max(group.total_byte_size, group.num_rows * group.num_columns * _LEAST_CELL_BYTES)


def largest_group(log: Source) -> int:
    """Return the bytes of a log's largest row group: parts of this size are single groups, unless smaller ones fit in one."""
    metadata = read_metadata(log)
    return max((_size(metadata.row_group(number)) for number in range(metadata.num_row_groups)), default=1)


def read_metadata(log: Source) -> pq.FileMetaData:
    """Read a log's Parquet metadata."""
    with open_log(log) as file:
        return pq.read_metadata(pa.PythonFile(file, mode="r"))


def read_slices(
    log: Source, *, part_bytes: int, skip: Callable[[int], bool], columns: Collection[str] | None
) -> Iterator[tuple[int, Slice, pa.Table]]:
    """Yield the number, slice and content of each part that `skip` doesn't skip, with the given columns or all."""
    with open_log(log) as opened, pq.ParquetFile(pa.PythonFile(opened, mode="r")) as file:
        slices = plan(file.metadata, part_bytes)
        names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        for groups, numbered in itertools.groupby(enumerate(slices), key=lambda item: item[1].groups):
            unskipped = [(number, part) for number, part in numbered if not skip(number)]
            if not unskipped:
                continue
            batches = file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=names, use_threads=False)
            decoded, position = pa.table({}), 0  # the groups' rows from `position` on
            for number, part in unskipped:
                while position + len(decoded) < part.skipped + part.rows:
                    if position + len(decoded) <= part.skipped:
                        decoded, position = pa.table({}), position + len(decoded)
                    batch = next(batches, None)
                    if batch is None:
                        raise pa.ArrowInvalid("its metadata states more rows than it holds")
                    new_rows = pa.Table.from_batches([batch])
                    decoded = pa.concat_tables([decoded, new_rows]) if len(decoded) else new_rows
                yield number, part, decoded.slice(part.skipped - position, part.rows)
                decoded, position = decoded.slice(part.skipped + part.rows - position), part.skipped + part.rows
