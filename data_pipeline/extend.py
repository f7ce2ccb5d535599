"""Vocabularies extended by new values: known values keep their ids, so a model's embedding rows keep their meaning.

New values are appended by falling count in the new training rows, equal counts by value. Known values keep their counts, which are
those of earlier logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipeline.buckets import Counted
from data_pipeline.hashing import TableIds, encode_keys
from data_pipeline.manifest import CategoricalColumn, check_file
from data_pipeline.verify import read_row_groups
from data_pipeline.vocabulary import MOST_IDS, ranked, write_vocabulary


def extend_vocabulary(
    column: CategoricalColumn,
    values: Iterable[Counted],
    *,
    key_dtype: np.dtype,
    max_ids: int | None,
    room: int,
    known: Path,
    data: Path,
    work: Path,
) -> CategoricalColumn:
    """Write a column's vocabulary and table with the values of new logs that are frequent enough.

    Args:
        column: from the known data set; it has a vocabulary.
        values, key_dtype, work: as for `data_pipeline.vocabulary.ranked`, for the new logs.
        max_ids: the most values that get an id, known ones included; None for no limit.
        room: the most bytes of the known table to hold in memory.
        known: the known data set's folder.

    Returns:
        The column with its new files, or unchanged if there are no new values.

    Raises:
        ValueError: there are more ids than an int32 can hold.
    """
    assert column.vocabulary, "only columns with a vocabulary are extended"
    assert column.table, "`recorded_log` refuses data sets without tables"
    known_rows, vocabulary = column.vocabulary.rows, check_file(column.vocabulary, known)
    id_source = TableIds(check_file(column.table, known), key_dtype, room)
    most = None if max_ids is None else max(0, max_ids - known_rows)
    new_values = _without_id(values, id_source)
    with ranked(column.name, new_values, key_dtype=key_dtype, min_count=column.min_count, most=most, work=work) as new:
        if not new.rows:
            return column
        rows = known_rows + new.rows
        if rows >= MOST_IDS:
            raise ValueError(f"{column.name} would have {rows} values, more than 32-bit ids allow; preprocess all logs again")

        def blocks() -> Iterator[Counted]:
            for _, group in read_row_groups(vocabulary):
                yield group.column("value").to_numpy(), group.column("count").to_numpy()
            yield from new.blocks()

        file, table = write_vocabulary(column.name, blocks, rows, key_dtype=key_dtype, data=data)
    return replace(column, num_embeddings=rows + 1, vocabulary=file, table=table, grown=(*column.grown, column.num_embeddings))


def _without_id(values: Iterable[Counted], id_source: TableIds) -> Iterator[Counted]:
    for keys, counts in values:
        ids, _ = encode_keys([id_source], keys[np.newaxis], np.zeros((1, len(keys)), np.bool_))
        yield keys[ids[0] == 0], counts[ids[0] == 0]
