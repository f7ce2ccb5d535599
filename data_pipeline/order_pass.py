"""Between the passes, with `--order similarity`: training rows are sampled, and vocabularies written in an order of similarity.

The vectors from which the order follows are kept in the data set, for tables to start from. The sample is read again from the logs,
part by part, as ids of the vocabularies in order of frequency. It, and the number of values that are ordered, are limited by
`memory_limit`; values beyond, the rarest ones, stay in order of frequency at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_pipeline.atomic import replacing
from data_pipeline.cooccurrence import cooccurrence_vectors
from data_pipeline.count_pass import CountedPart
from data_pipeline.job import Job, part_name
from data_pipeline.manifest import CategoricalColumn, describe_file
from data_pipeline.parts import Part
from data_pipeline.pool import Schedule
from data_pipeline.runs import Counted
from data_pipeline.shards import Encoder
from data_pipeline.similarity import similarity_order
from data_pipeline.splits import Rows, rows_by_position
from data_pipeline.verify import read_row_groups
from data_pipeline.vocabulary import write_vocabulary

_MOST_CELLS = 1 << 25
_BYTES_PER_CELL, _BYTES_PER_VALUE = 16, 768  # of memory while vectors are computed and ordered


@dataclass(frozen=True, kw_only=True)
class _Sampling:
    """How to sample a part: its first row, those of validation and test, and each column's first number and number of values."""

    first_row: int
    bounds: tuple[int, int]
    firsts: np.ndarray
    sizes: np.ndarray


def order_vocabularies(
    job: Job,
    schedule: Schedule,
    parts: Sequence[CountedPart],
    bounds: tuple[int, int],
    encoder: Encoder,
    columns: tuple[CategoricalColumn, ...],
) -> tuple[CategoricalColumn, ...]:
    """Write the vocabularies in an order of similarity, and return the columns with their new files.

    An interrupted call resumes, because each sampled part and each finished column is recorded.

    Args:
        bounds: the numbers of the first validation and test rows, if splits go by position.
        encoder, columns: of the vocabularies in order of frequency.
    """
    records = {number: f"tables/ordered-{number:03d}" for number, column in enumerate(columns) if column.vocabulary}
    ordered = {number: column for number, name in records.items() if (column := job.work.load(name, CategoricalColumn))}
    if len(ordered) < len(records):
        room = job.options.order_bytes // 2
        sizes = _shares([column.num_embeddings - 1 for column in columns], room // _BYTES_PER_VALUE)
        values, ends = _sample(job, schedule, parts, bounds, encoder, sizes, min(_MOST_CELLS, room // _BYTES_PER_CELL))
        vectors = cooccurrence_vectors(values, ends, int(sizes.sum()))
        firsts = np.cumsum(sizes) - sizes

    def order_column(number: int) -> None:
        if number not in ordered:
            ordered[number] = _write_ordered(job, columns[number], vectors[firsts[number] : firsts[number] + sizes[number]])
            job.work.save(records[number], ordered[number])

    with ThreadPoolExecutor(job.options.threads) as pool:
        list(tqdm(pool.map(order_column, records), total=len(records), desc="ordering", unit="column", disable=None))
    return tuple(ordered.get(number, column) for number, column in enumerate(columns))


def _shares(sizes: Sequence[int], room: int) -> np.ndarray:
    """Return how many of each column's values to order, all values of the smallest columns."""
    shares = np.zeros(len(sizes), np.int64)
    for waiting, number in zip(range(len(sizes), 0, -1), np.argsort(sizes, kind="stable"), strict=True):
        shares[number] = min(sizes[number], room // waiting)
        room -= shares[number]
    return shares


def _sample(
    job: Job,
    schedule: Schedule,
    parts: Sequence[CountedPart],
    bounds: tuple[int, int],
    encoder: Encoder,
    sizes: np.ndarray,
    most_cells: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of training rows and where each row's begin and end; of long logs, those of evenly spaced parts."""
    training = [part for part in parts if (job.splitting.by_row or part.first_row < bounds[0]) and part.counts.rows]
    cells = sum(part.counts.rows for part in training) * len(sizes)
    chosen = training[:: max(1, cells // most_cells)]
    firsts = np.cumsum(sizes) - sizes
    details = {
        (part.log, part.number): _Sampling(first_row=part.first_row, bounds=bounds, firsts=firsts, sizes=sizes) for part in chosen
    }
    waiting = {key for key in details if not _path(job, key).exists()}
    done = {log: {part.number for part in parts if part.log == log and (log, part.number) not in waiting} for log, _ in waiting}
    with (
        tqdm(desc="sampling", total=len(details), unit="part", disable=None, initial=len(details) - len(waiting)) as bar,
        closing(schedule(job, partial(_sample_part, encoder), done, details)) as results,
    ):
        for _ in results:
            bar.update()
    samples, paths = [], [_path(job, key) for key in sorted(details)]
    cells = sum(path.stat().st_size for path in paths) // 4  # more than estimated, if there are lists
    for path in paths[:: max(1, cells // (2 * most_cells))]:
        with np.load(path) as sample:
            samples.append((sample["values"], sample["lengths"]))
    values, lengths = (np.concatenate(arrays) for arrays in zip(*samples, strict=True))
    return values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)], dtype=np.int32)


def _path(job: Job, key: tuple[int, int]) -> Path:
    return job.work.path / "samples" / f"{part_name(*key)}.npz"


def _sample_part(encoder: Encoder, job: Job, part: Part, sampling: _Sampling) -> None:
    path, values, lengths, first = _path(job, (part.log, part.number)), [], [], sampling.first_row
    for parsed in job.blocks(part):
        by_position = rows_by_position(first, parsed.rows, sampling.bounds)
        rows: Rows = job.rows_by_draw(part, parsed)["train"] if job.splitting.by_row else by_position["train"]
        first += parsed.rows
        ids, _ = encoder.singles(parsed, rows)
        lists = [encoder.list(parsed, number, rows) for number in range(len(parsed.list_ends))]
        cells = [(column, np.arange(ids.shape[1])) for column in ids]
        cells += [(elements, np.repeat(np.arange(ids.shape[1]), counts)) for elements, counts, _ in lists]
        of_rows, numbers = [], []
        for (column, row), first_value, size in zip(cells, sampling.firsts, sampling.sizes, strict=True):
            is_known = (column > 0) & (column <= size)
            of_rows.append(row[is_known])
            numbers.append(first_value + column[is_known] - 1)
        row = np.concatenate(of_rows)
        values.append(np.concatenate(numbers).astype(np.int32)[np.argsort(row, kind="stable")])
        lengths.append(np.bincount(row, minlength=ids.shape[1]))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, values=np.concatenate(values), lengths=np.concatenate(lengths))


def _head(vocabulary: Path, rows: int) -> float:
    """Return the share of all occurrences that the most frequent twentieth of the values has."""
    most, head, total = -(-rows // 20), 0, 0
    for first, group in read_row_groups(vocabulary):
        counts = group.column("count").to_numpy()
        head += int(counts[: max(0, most - first)].sum())
        total += int(counts.sum())
    return head / total


def _write_ordered(job: Job, column: CategoricalColumn, vectors: np.ndarray) -> CategoricalColumn:
    """Write a vocabulary with the values that have vectors in order of similarity, and the others as they were."""
    assert column.vocabulary
    path = job.work.ranked / column.vocabulary.path
    order = similarity_order(vectors)
    vectors_path = f"vocabulary/{Path(column.vocabulary.path).stem}.npy"
    with replacing(job.work.data / vectors_path) as temporary, temporary.open("wb") as to:
        np.save(to, vectors[order].astype(np.float16))

    def blocks() -> Iterator[Counted]:
        head: list[Counted] = []
        for first, group in read_row_groups(path):
            keys, counts = (group.column(name).to_numpy() for name in ("value", "count"))
            of_head = max(0, len(order) - first)
            if of_head:
                head.append((keys[:of_head], counts[:of_head]))
            if head and first + len(keys) >= len(order):
                head_keys, head_counts = (np.concatenate(arrays) for arrays in zip(*head, strict=True))
                yield head_keys[order], head_counts[order]
                head = []
            if of_head < len(keys):
                yield keys[of_head:], counts[of_head:]

    rows, key_dtype = column.vocabulary.rows, job.schema.key_dtype
    file, table = write_vocabulary(column.name, blocks, rows, key_dtype=key_dtype, data=job.work.data)
    kept = describe_file(vectors_path, job.work.data, rows=len(order))
    return replace(column, vocabulary=file, table=table, order="similarity", vectors=kept, head=_head(path, rows))
