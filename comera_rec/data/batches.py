"""A preprocessed data set as training batches: Parquet row groups in, KeyedJaggedTensors out, resumable at any batch.

    dataset = ParquetBatches("data/", "train", batch_size=16_384, shuffle=True, epochs=None, drop_last=True)
    loader = BatchLoader(dataset)                  # reads ahead in a thread
    for batch in loader:
        logits = model(batch.dense, batch.sparse)
        checkpoint = loader.state_dict()           # resumes with the batch after this one

The batches of an epoch depend on nothing but (seed, epoch) and the batch's number. Row groups are permuted and laid end to end;
each of R readers takes an equal, contiguous share of that sequence of rows, permutes it within buffers of at least
`shuffle_rows` / R rows, and gives B / r rows to every batch of its process, which has r readers. A position is therefore two
numbers, and resuming skips to the row groups that hold the next rows.

Any number of processes that divides R reads the same rows in every step: their batches, joined in order, are the batch of a single
process. So a run can resume on any such number of processes.

No row is read twice, by two processes or by two of torch's workers, each of which has R separate readers. Every process gets the
same number of batches per epoch: rows / R, rounded up to whole batches where the last ones are shorter, or rounded down with
`drop_last`, which leaves out fewer rows than one batch of all processes plus one row per reader. All processes have the same state.

Letters: B rows in a batch of one process, n rows of any other set, L labels, W columns of weights (0 or 1), I integer columns,
C categorical columns.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info

from comera_rec.data.batch import Batch, keyed_rows, one_per_row
from data_pipeline.arrow import to_arrow
from data_pipeline.errors import UserError
from data_pipeline.manifest import REMEDY, Manifest, check_shards, read_manifest
from data_pipeline.sources import Source, join, open_ranges

Item = TypeVar("Item")


class RowRange(NamedTuple):
    """Rows start:stop of one row group, whose sizes tell whether its file was replaced since."""

    path: Source
    row_group: int
    start: int
    stop: int
    sizes: tuple[int, ...]


class ParquetBatches(IterableDataset[Batch]):
    """The batches of one split for one process; iterate it directly, by BatchLoader, or by torch's DataLoader(batch_size=None).

    Every row of an epoch is in exactly one batch of one process and worker (with drop_last: in at most one), and all processes get
    the same number of batches, so that collectives of the model stay in step. Without drop_last the last batches are smaller.

    Args:
        data: the data set's folder, or a URL such as s3://bucket/data.
        split: "train", "val" or "test".
        batch_size: rows in a batch of this process.
        shuffle: permute row groups and rows anew in every epoch; False keeps the order of the files.
        shuffle_rows: rows that are permuted at once, in the buffers of all processes together; a reader's buffer has at least one
            row group. A row takes 4 bytes x (I + C + L + W); a reader may hold its buffer up to three times, and the next one.
        seed: determines the permutations, together with the epoch.
        epochs: passes over the split in one iteration; None = endless.
        process_rank, world_size: which share of the rows this process takes.
        readers: readers of all processes together, among which the rows are divided: a multiple of world_size such that a
            process's readers give equally many rows to every batch. None for one per process.
        threads: threads that read the next buffers of this process's readers meanwhile; 0 to read a buffer when it is needed, which
            takes less memory.
        drop_last: leave out the rows that do not fill a batch on every process.

    Raises:
        ValueError: for an argument out of range, an unlabeled data set, an empty split, fewer rows than one batch needs, or a shard
            that does not match the manifest. While iterating: for an id outside its table, a label other than 0 or 1,
            a weight below 0 or not finite, an empty cell, or a shard that was replaced.
    """

    def __init__(
        self,
        data: str | Path,
        split: str,
        *,
        batch_size: int,
        shuffle: bool = False,
        shuffle_rows: int = 131_072,
        seed: int = 0,
        epochs: int | None = 1,
        process_rank: int = 0,
        world_size: int = 1,
        readers: int | None = None,
        drop_last: bool = False,
        threads: int = 0,
    ) -> None:
        given = {"batch_size": (batch_size, 1), "shuffle_rows": (shuffle_rows, 1), "world_size": (world_size, 1), "seed": (seed, 0)}
        for name, (value, least) in (given | {"threads": (threads, 0)}).items():
            if value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")
        if epochs is not None and epochs < 1:
            raise UserError(f"epochs must be at least 1, or None for endless, got {epochs}")
        if not 0 <= process_rank < world_size:
            raise UserError(f"process_rank must be in 0..{world_size - 1} (world_size {world_size}), got {process_rank}")
        readers = world_size if readers is None else readers
        if not self._can_share(readers, batch_size, world_size):
            raise UserError(
                f"readers must be a multiple of world_size ({world_size}) that divides the {batch_size * world_size} rows of all "
                f"processes' batches, got {readers}"
            )
        self.manifest = read_manifest(data)
        self.batch_size, self.shuffle, self.shuffle_rows, self.seed, self.epochs = batch_size, shuffle, shuffle_rows, seed, epochs
        self.process_rank, self.world_size, self.readers, self.drop_last = process_rank, world_size, readers, drop_last
        self.threads = threads
        self._dense_names = [column.name for column in self.manifest.integer_columns]
        self._label_names = [label.name for label in self.manifest.labels]
        self._weight_names = [self.manifest.weight.name] if self.manifest.weight else []
        columns = self.manifest.categorical_columns
        self._single_names = [column.name for column in columns if not column.is_list]
        self._list_names = [column.name for column in columns if column.is_list]
        self._num_embeddings = {column.name: column.num_embeddings for column in columns}
        self._columns = [*self._label_names, *self._weight_names, *self._dense_names, *self._num_embeddings]
        self._row_groups = _row_groups(self.manifest, data, split)
        self.rows = sum(span.stop for span in self._row_groups)
        self.batches_per_epoch()  # there must be at least one
        self._next = (0, 0)  # epoch, batch within it
        self._resume_at = (0, 0)

    @staticmethod
    def _can_share(readers: int, batch_size: int, world_size: int) -> bool:
        return readers > 0 and readers % world_size == 0 and batch_size * world_size % readers == 0

    def batches_per_epoch(self, workers: int = 1) -> int:
        """Return how many batches each worker of each process yields per epoch; ValueError if there are too few rows for that."""
        readers, rows = self.readers * workers, self._rows_of_a_reader()
        batches = self.rows // readers // rows if self.drop_last else math.ceil(math.ceil(self.rows / readers) / rows)
        if not 0 < batches <= self.rows // readers:
            raise UserError(
                f"batches of {self.batch_size * self.world_size} rows on {readers} readers don't divide {self.rows} rows equally; "
                "lower batch_size, or use fewer processes or workers"
            )
        return batches

    def _rows_of_a_reader(self) -> int:
        """Return the rows that a reader gives to a full batch."""
        return self.batch_size * self.world_size // self.readers

    def __iter__(self) -> Iterator[Batch]:
        (epoch, batch), self._resume_at = self._resume_at, (0, 0)
        while self.epochs is None or epoch < self.epochs:
            for number, rows in enumerate(self._epoch(epoch, batch), start=batch + 1):
                self._next = (epoch, number)
                yield self._batch(rows)
            epoch, batch = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch yielded, and the settings that it depends on; the same on every process."""
        return {"epoch": self._next[0], "batch": self._next[1], **self._identity()}

    def state_after(self, batches: int) -> dict[str, int]:
        """Return the `state_dict()` of an iteration from the beginning after a number of batches."""
        epoch, batch = divmod(batches, self.batches_per_epoch())
        return {"epoch": epoch, "batch": batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken, with the same number of readers.

        Raises:
            ValueError: if batch size, shuffling, seed or data differed there, or the processes can't share its readers.
        """
        readers = state.get("readers", 0)
        if state.get("batch_size") == self.batch_size * self.world_size:
            if not self._can_share(readers, self.batch_size, self.world_size):
                raise UserError(
                    f"cannot resume the batches: {readers} readers made them, which {self.world_size} processes can't share: "
                    f"launch a number of processes that divides {readers}, or start anew"
                )
            self.readers = readers
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UserError(f"cannot resume the batches: {name} was {state.get(name)}, not {value}; set it back or start anew")
        self._resume_at = self._next = (state["epoch"], state["batch"])

    def _identity(self) -> dict[str, int]:
        names = ("shuffle", "shuffle_rows", "seed", "readers", "drop_last", "rows")
        return {"batch_size": self.batch_size * self.world_size} | {name: int(getattr(self, name)) for name in names}

    def _epoch(self, epoch: int, first: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of batches first, first + 1, ... of this process in an epoch."""
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        readers, process_readers = self.readers * workers, self.readers // self.world_size * workers
        first_reader = self.process_rank * process_readers
        local_readers = range(first_reader + worker_id, first_reader + process_readers, workers)
        shares = [(self.rows * reader // readers, self.rows * (reader + 1) // readers) for reader in local_readers]
        count = self.batches_per_epoch(workers)
        pool = ThreadPoolExecutor(self.threads, "ParquetBatches") if self.threads else None
        try:
            parts_of_readers = [self._parts(epoch, share, first, count, pool) for share in shares]
            for parts in zip(*parts_of_readers, strict=True):
                yield _concatenated(list(itertools.chain.from_iterable(parts)))
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _parts(
        self, epoch: int, share: tuple[int, int], first: int, count: int, pool: ThreadPoolExecutor | None
    ) -> Iterator[list[pa.RecordBatch]]:
        """Return the rows that a reader gives to batches first, first + 1, ... of `count`; the pool starts to read them."""
        size = self._rows_of_a_reader()

        def end(batch: int) -> int:
            # Shares differ by a row. Where a reader would have no row left for its last batch, the batch before leaves it one.
            full = (batch + 1) * size
            return full if self.drop_last else min(full, share[1] - share[0] - (count - 1 - batch))

        ends = [end(batch) for batch in range(first - 1, count)]
        chunks = self._chunks(epoch, share, ends[0])
        sizes = (stop - start for start, stop in itertools.pairwise(ends))
        return _cut(chunks if pool is None else read_ahead(chunks, pool), sizes)

    def _chunks(self, epoch: int, share: tuple[int, int], skip: int) -> Iterator[pa.RecordBatch]:
        """Yield a reader's share of an epoch's rows from its row `skip` on, buffer by buffer, permuted within each."""
        order = np.arange(len(self._row_groups))
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        for start, buffer in self._buffers(order, share):
            size = sum(span.stop - span.start for span in buffer)
            if start - share[0] + size <= skip:
                continue
            rows = _concatenated([self._read(span) for span in buffer])
            if self.shuffle:
                # The buffer's first row, counted over all readers, distinguishes it from every other buffer of the epoch.
                rows = rows.take(to_arrow(np.random.default_rng((self.seed, epoch, start)).permutation(size)))
            yield rows.slice(max(0, skip - (start - share[0])))

    def _buffers(self, order: np.ndarray, share: tuple[int, int]) -> Iterator[tuple[int, list[RowRange]]]:
        """Yield each buffer's first row number and row ranges; all but the last have at least shuffle_rows / readers rows."""
        buffer_rows = self.shuffle_rows / self.readers if self.shuffle else 1
        begin, buffer, buffered, position = share[0], [], 0, 0
        for group in (self._row_groups[index] for index in order):
            start, stop = max(share[0] - position, 0), min(share[1] - position, group.stop)
            position += group.stop
            if start >= stop:
                continue
            buffer.append(group._replace(start=start, stop=stop))
            buffered += stop - start
            if buffered >= buffer_rows or position >= share[1]:
                yield begin, buffer
                begin, buffer, buffered = begin + buffered, [], 0

    def _read(self, span: RowRange) -> pa.RecordBatch:
        try:
            is_local = isinstance(span.path, Path)
            with pq.ParquetFile(open_ranges(span.path), memory_map=is_local, pre_buffer=not is_local) as file:
                table = None
                if span.row_group < file.num_row_groups and _sizes(file.metadata, span.row_group) == span.sizes:
                    # Decoding runs outside Python's lock, so a training thread beside this one is not delayed.
                    table = file.read_row_group(span.row_group, columns=self._columns).slice(span.start, span.stop - span.start)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{span.path}, row group {span.row_group}, cannot be read ({error}); {REMEDY}") from error
        if table is None or table.num_columns < len(self._columns):
            raise UserError(f"{span.path} was replaced while it was in use; put back the file that was there, or start anew")
        rows = table.combine_chunks().to_batches()[0]
        for name in self._columns:
            cells = rows.column(name)
            numbers = cells.flatten() if name in self._list_names else cells
            if cells.null_count or numbers.null_count:
                raise UserError(f"{span.path}: column {name} has an empty cell in row group {span.row_group}; {REMEDY}")
            numbers = np.from_dlpack(numbers)
            if name in self._label_names and not np.isin(numbers, (0, 1)).all():
                raise UserError(f"{span.path}: labels in row group {span.row_group} are not all 0 or 1; {REMEDY}")
            if name in self._weight_names and not (np.isfinite(numbers) & (numbers >= 0)).all():
                raise UserError(f"{span.path}: weights in row group {span.row_group} are not all finite and at least 0; {REMEDY}")
            limit = self._num_embeddings.get(name)
            if limit and len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
                wrong = numbers[(numbers < 0) | (numbers >= limit)][0]
                raise UserError(f"{span.path}: table {name}: id {wrong} is not in 0..{limit - 1}; {REMEDY}")
        return rows

    def _batch(self, rows: pa.RecordBatch) -> Batch:
        size, singles = len(rows), len(self._single_names)
        lengths, offsets = one_per_row(singles, size, torch.device("cpu"))
        values = torch.from_numpy(_stacked(rows, self._single_names).T.astype(np.int64, order="C").ravel())
        counts = [size] * singles
        if lists := [rows.column(name) for name in self._list_names]:
            flat = [np.from_dlpack(column.flatten()) for column in lists]
            values = torch.cat([values, torch.from_numpy(np.concatenate(flat, dtype=np.int64))])
            lengths = torch.cat([lengths, *(torch.from_numpy(np.diff(np.from_dlpack(column.offsets))) for column in lists)])
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            counts += map(len, flat)
        sparse = keyed_rows(self._single_names + self._list_names, values, lengths, offsets, size, counts)
        dense, labels, weights = (
            torch.from_numpy(_stacked(rows, names).astype(np.float32, order="C"))
            for names in (self._dense_names, self._label_names, self._weight_names)
        )
        if len(self._label_names) == 1:
            labels = labels.flatten()
        return Batch(dense=dense, sparse=sparse, labels=labels, weights=weights.flatten() if self._weight_names else None)


def read_ahead(items: Iterator[Item], pool: ThreadPoolExecutor, count: int = 1) -> Iterator[Item]:
    """Let a pool read the first items at once, and a next one whenever one is taken; of a pool, one thread at a time reads them."""
    waiting = deque(pool.submit(next, items, None) for _ in range(count))

    def read() -> Iterator[Item]:
        while (item := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, items, None))
            yield item

    return read()


def _cut(chunks: Iterator[pa.RecordBatch], sizes: Iterable[int]) -> Iterator[list[pa.RecordBatch]]:
    """Cut consecutive rows into lists of parts that have the given sizes."""
    chunk, taken = pa.RecordBatch.from_pylist([]), 0
    for missing in sizes:
        parts = []
        while missing:
            if taken == chunk.num_rows:
                chunk, taken = next(chunks), 0
            parts.append(chunk.slice(taken, missing))
            taken += parts[-1].num_rows
            missing -= parts[-1].num_rows
        yield parts


def _concatenated(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _stacked(rows: pa.RecordBatch, names: Sequence[str]) -> np.ndarray:
    """Return columns of numbers as [n, columns]."""
    return rows.select(names).to_tensor(row_major=False).to_numpy() if names else np.empty((len(rows), 0), np.int32)


def _is_lists(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_int32(kind.value_type)


def _row_groups(manifest: Manifest, data: Source, split: str) -> list[RowRange]:
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
        sizes = [_sizes(footer, group) for group in range(footer.num_row_groups)]
        ranges += [RowRange(path, group, 0, of_group[0], of_group) for group, of_group in enumerate(sizes)]
    return [rows for rows in ranges if rows.stop]


def _sizes(footer: pq.FileMetaData, number: int) -> tuple[int, ...]:
    """Return a row group's rows, bytes, and about where it ends, which depends on the compressed bytes of all groups up to it."""
    group = footer.row_group(number)
    last = group.column(group.num_columns - 1)
    return group.num_rows, group.total_byte_size, last.data_page_offset + last.total_compressed_size
