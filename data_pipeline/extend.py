"""A data set's vocabularies with new values at their ends: ids of known values stay, so that a model's rows keep their meaning.

New values follow by falling count in the new training rows, equal counts by value. The counts of known values stay those of the
logs that made them known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipeline.atomic import replacing
from data_pipeline.hashing import TableIds, allocate, capacity_for, insert
from data_pipeline.manifest import CategoricalColumn, check_file, describe_file
from data_pipeline.schema import file_name
from data_pipeline.verify import read_row_groups
from data_pipeline.vocabulary import MOST_IDS, Run, merge_runs, write_vocabulary


def extend_vocabulary(
    column: CategoricalColumn,
    runs: Sequence[Run],
    *,
    key_dtype: np.dtype,
    max_ids: int | None,
    entries: int,
    known: Path,
    data: Path,
) -> CategoricalColumn:
    """Write a column's vocabulary and table with the values of new logs that are frequent enough.

    Args:
        column: as the known data set has it, with a vocabulary.
        runs, key_dtype, entries: as for `data_pipeline.vocabulary.merge_runs`, of the new logs.
        max_ids: values that get an id, known ones included.
        known: folder of the known data set.
        data: folder of the new one, which holds the known files already where nothing is new.

    Returns:
        The column with its new files; the column itself if there is no new value.

    Raises:
        ValueError: there are more ids than an int32 holds.
    """
    assert column.vocabulary, "a column without a vocabulary has none to extend"
    assert column.table, "`recorded_log` refuses data sets without tables"
    keys, counts = _new_values(column, runs, key_dtype=key_dtype, entries=entries, known=known)
    before = column.vocabulary.rows
    kept = max(0, min(len(keys), (max_ids or len(keys) + before) - before))
    if before + kept >= MOST_IDS:
        raise ValueError(f"{column.name} would have {before + kept} values, more than ids of 32 bits; preprocess anew")
    if not kept:
        return column
    order = np.lexsort((keys, -counts))[:kept]
    keys, counts = keys[order], counts[order]

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        assert column.vocabulary, "as above"
        for _, group in read_row_groups(check_file(column.vocabulary, known)):
            yield group.column("value").to_numpy(), group.column("count").to_numpy()
        yield keys, counts

    stem = file_name(column.name)
    path, table, rows = f"vocabulary/{stem}.parquet", f"vocabulary/{stem}.table", before + kept
    with replacing(data / table) as beside:
        pairs, first = allocate(beside, key_dtype, (capacity_for(rows), 2)), 1
        for values, _ in blocks():
            insert(pairs, values, np.arange(first, first + len(values)))
            first += len(values)
        del pairs
    with replacing(data / path) as beside:
        write_vocabulary(beside, blocks(), key_dtype=key_dtype)
    return replace(
        column,
        num_embeddings=rows + 1,
        vocabulary=describe_file(path, data, rows=rows),
        table=describe_file(table, data, rows=rows),
        grown=(*column.grown, column.num_embeddings),
    )


def _new_values(
    column: CategoricalColumn, runs: Sequence[Run], *, key_dtype: np.dtype, entries: int, known: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Values without an id, and their counts, that are frequent enough for one."""
    assert column.table, "checked by the caller"
    ids_of = TableIds(check_file(column.table, known), key_dtype)
    new_keys, new_counts = [np.empty(0, key_dtype)], [np.empty(0, np.int64)]
    for keys, counts in merge_runs(runs, key_dtype=key_dtype, entries=entries):
        ids = np.empty(len(keys), np.int32)
        ids_of(keys, np.zeros(len(keys), np.bool_), ids)
        chosen = (ids == 0) & (counts >= column.min_count)
        new_keys.append(keys[chosen])
        new_counts.append(counts[chosen])
    return np.concatenate(new_keys), np.concatenate(new_counts)
