"""Between the passes, with `--order similarity`: training rows are sampled, and vocabularies written in an order of similarity.

The vectors from which the order follows are kept in the data set, for tables to start from. The sample is read again from the logs,
part by part, as ids of the vocabularies in order of frequency. It, and the number of values that are ordered, are limited by
`memory_limit`; values beyond, the rarest ones, stay in order of frequency at the end.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_pipeline.atomic import replacing
from data_pipeline.cooccurrence import cooccurrence_vectors
from data_pipeline.count_pass import PartCounts
from data_pipeline.encoder import flatten
from data_pipeline.hashing import shares
from data_pipeline.job import Job
from data_pipeline.manifest import CategoricalColumn, describe_file, read_row_groups
from data_pipeline.parts import Part
from data_pipeline.passes import Key, by_log, work_on_parts
from data_pipeline.runs import Counted
from data_pipeline.shards import Encoder
from data_pipeline.similarity import similarity_order
from data_pipeline.splits import in_pieces
from data_pipeline.vocabulary import write_vocabulary

_MOST_CELLS = 1 << 25
_BYTES_PER_CELL, _BYTES_PER_VALUE = 16, 768  # of memory while vectors are computed and ordered
_PIECE_CELLS = 1 << 20  # ids at once, which take some 70 bytes each
_Sample = tuple[np.ndarray, np.ndarray]  # the values of rows, concatenated, and how many each row has


def order_vocabularies(
    job: Job, parts: Sequence[PartCounts], encoder: Encoder, columns: tuple[CategoricalColumn, ...]
) -> tuple[CategoricalColumn, ...]:
    """Write the vocabularies in an order of similarity, and return the columns with their new files.

    Args:
        encoder, columns: of the vocabularies in order of frequency.
    """
    room = job.options.order_bytes // 2
    # All values of the smallest columns, and equally many of the others.
    sizes = np.array(shares([column.num_embeddings - 1 for column in columns], room // _BYTES_PER_VALUE), np.int64)
    values, lengths = _sample(job, parts, encoder, sizes, min(_MOST_CELLS, room // _BYTES_PER_CELL))
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)], dtype=np.int32)
    vectors = np.split(cooccurrence_vectors(values, ends, int(sizes.sum())), np.cumsum(sizes)[:-1])

    def order_column(number: int) -> CategoricalColumn:
        return _write_ordered(job, columns[number], vectors[number]) if columns[number].vocabulary else columns[number]

    with ThreadPoolExecutor(job.options.threads) as pool:
        ordered = pool.map(order_column, range(len(columns)))
        return tuple(tqdm(ordered, total=len(columns), desc="ordering", unit="column", disable=None))


def _sample(job: Job, parts: Sequence[PartCounts], encoder: Encoder, sizes: np.ndarray, most_cells: int) -> _Sample:
    """Return the values of training rows; of long logs, those of evenly spaced parts."""
    training = [part for part in parts if part.rows and (job.splitting.by_row or part.split_rows[0] > 0)]
    cells = sum(part.rows for part in training) * len(sizes)
    chosen = {part.key: part.first_row for part in training[:: max(1, cells // most_cells)]}
    of_logs, logs = by_log(parts), dict.fromkeys(log for log, _ in chosen)
    done = {log: {part.number for part in of_logs[log] if part.key not in chosen} for log in logs}
    most = 4 * most_cells // max(1, len(chosen))
    sampled = work_on_parts(job, partial(_sample_part, encoder, sizes, most), done, chosen)
    samples = dict(tqdm(sampled, desc="sampling", total=len(chosen), unit="part", disable=None))
    values, lengths = zip(*(samples[key] for key in sorted(samples)), strict=True)
    return np.concatenate(values), np.concatenate(lengths)


def _sample_part(encoder: Encoder, sizes: np.ndarray, room: int, job: Job, part: Part, first_row: int) -> tuple[Key, _Sample]:
    """Sample a part's rows, up to the piece that fills the room for values, as lists may hold more than the columns promise."""
    parsed = job.parse(part)
    values, lengths, firsts = [np.empty(0, np.int32)], [np.empty(0, np.int64)], np.cumsum(sizes) - sizes
    for rows in in_pieces(job.rows_by_split(part, parsed, first_row)["train"], parsed.rows_in(_PIECE_CELLS)):
        _, ids, counts = flatten(encoder, parsed, rows)
        cell_of = np.repeat(np.arange(len(counts)), counts)
        column, row = np.divmod(cell_of, max(1, len(counts) // len(firsts)))
        is_known = (ids > 0) & (ids <= sizes[column])
        row = row[is_known]
        values.append((firsts[column] + ids - 1)[is_known].astype(np.int32)[np.argsort(row, kind="stable")])
        lengths.append(np.bincount(row, minlength=len(counts) // len(firsts)))
        room -= len(row)
        if room <= 0:
            break
    return (part.log, part.number), (np.concatenate(values), np.concatenate(lengths))


def _head(vocabulary: Path, rows: int) -> float | None:
    """Return the share of all occurrences that the most frequent twentieth of the values has; None without values."""
    most, head, total = -(-rows // 20), 0, 0
    for first, group in read_row_groups(vocabulary):
        counts = group.column("count").to_numpy()
        head += int(counts[: max(0, most - first)].sum())
        total += int(counts.sum())
    return head / total if total else None


def _write_ordered(job: Job, column: CategoricalColumn, vectors: np.ndarray) -> CategoricalColumn:
    """Write a vocabulary with the values that have vectors in order of similarity, and the others as they were."""
    assert column.vocabulary
    path = job.work.ranked / column.vocabulary.path
    order = similarity_order(vectors)
    vectors_path = f"vocabulary/{Path(column.vocabulary.path).stem}.npy"
    kept_vectors = vectors[order].astype(np.float16)
    with replacing(job.work.data / vectors_path) as temporary, temporary.open("wb") as to:
        np.lib.format.write_array_header_1_0(to, np.lib.format.header_data_from_array_1_0(kept_vectors))
        to.write(kept_vectors.data)  # np.save doesn't say that a disk is full

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
