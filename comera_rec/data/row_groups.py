"""The row groups of a data set's Parquet files, and the checks before they are read."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.errors import UserError
from data_pipeline.manifest import REMEDY, Manifest, check_shards
from data_pipeline.sources import Source, join, open_ranges


class RowRange(NamedTuple):
    """Rows start:stop of one row group."""

    path: Source
    row_group: int
    start: int
    stop: int


def _is_lists(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_int32(kind.value_type)


def row_groups(manifest: Manifest, data: Source, split: str) -> list[RowRange]:
    """List a split's row groups in the order of its files, after comparing each file's size, rows and columns with the manifest."""
    if split not in manifest.splits:
        raise UserError(f"split {split!r} is not in {data}; it has {', '.join(manifest.splits)}")
    if manifest.label is None:
        raise UserError(f"{data} has no labels, so it can neither be trained nor evaluated on; preprocess logs with labels")
    if manifest.splits[split].rows == 0:
        raise UserError(f"split {split} of {data} is empty; preprocess more rows or give {split} a larger fraction of them")
    check_shards(manifest, data)
    types = {label.name: pa.types.is_integer for label in manifest.labels}
    types |= {manifest.weight.name: pa.types.is_float32} if manifest.weight else {}
    types |= {column.name: pa.types.is_float32 for column in manifest.integer_columns}
    types |= {column.name: _is_lists if column.is_list else pa.types.is_int32 for column in manifest.categorical_columns}
    ranges = []
    for shard in manifest.splits[split].shards:
        path = join(data, shard.path)
        try:
            footer = pq.read_metadata(open_ranges(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{path} is not a readable Parquet file ({error}); {REMEDY}") from error
        if footer.num_rows != shard.rows:
            raise UserError(f"{path} has {footer.num_rows} rows, the manifest states {shard.rows}; {REMEDY}")
        schema = footer.schema.to_arrow_schema()
        for name, matches in types.items():
            if name not in schema.names:
                raise UserError(f"{path} has no column {name}, but the manifest lists it; {REMEDY}")
            if not matches(schema.field(name).type):
                raise UserError(
                    f"{path}: column {name} is of type {schema.field(name).type}, which training does not read; {REMEDY}"
                )
        ranges += [RowRange(path, group, 0, footer.row_group(group).num_rows) for group in range(footer.num_row_groups)]
    return [rows for rows in ranges if rows.stop]
