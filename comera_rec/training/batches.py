"""A preprocessed data set as training batches: Parquet row groups in, KeyedJaggedTensors out, resumable at any batch.

    dataset = ParquetBatches("data/", "train", batch_size=16_384, shuffle=True, epochs=None, drop_last=True)
    loader = BatchLoader(dataset)                  # reads ahead in a thread
    for batch in loader:
        logits = model(batch.dense, batch.sparse)
        checkpoint = loader.state_dict()           # resumes with the batch after this one

The batches of an epoch are a function of (seed, epoch) and the batch's number alone. Row groups are permuted and laid end to end;
each of the S = world_size x workers readers takes an equal, contiguous share of that sequence of rows, permutes it within buffers
of at least `shuffle_rows` rows, and cuts it into batches. A position is therefore two numbers, and resuming skips to the row
group that holds the next row.

Across ranks and workers no row is read twice, and every rank gets equally many batches an epoch: rows / S, rounded up to whole
batches where the last ones are shorter, or down with `drop_last`, which leaves out fewer than B + 1 rows a reader. The state of
one rank is that of all.

Letters: B rows in a batch, n rows of any other set, L labels, W columns of weights (0 or 1), I integer and C categorical columns.
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torchrec import KeyedJaggedTensor

from data_pipeline.manifest import Manifest, check_shards, read_manifest
from data_pipeline.sources import Source
from data_pipeline.storage import join, open_ranges

_REMEDY = "run `comera preprocess` again"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of a data set.

    dense: [B, I] float32, the transformed integer columns in the manifest's order.
    sparse: int64 ids by categorical column (key), one a row or, in columns of lists, any number; lengths and offsets given.
    labels: [B] float32, 0 or 1; [B, L] where the data set has several labels, in the order of `Manifest.labels`.
    weights: [B] float32 of at least 0, what the rows' losses are multiplied with; None where the data set has none.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(torch.device(device), non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def padded(self, rows: int) -> Batch:
        """With rows of zeros, no ids, label 0 and weight 0 behind the others, as many as are missing."""
        missing = rows - len(self)
        if not missing:
            return self
        lengths = F.pad(self.sparse.lengths().view(len(self.sparse.keys()), len(self)), (0, missing)).flatten()
        return Batch(
            dense=F.pad(self.dense, (0, 0, 0, missing)),
            sparse=KeyedJaggedTensor(self.sparse.keys(), self.sparse.values(), lengths=lengths),
            labels=F.pad(self.labels, (*[0, 0] * (self.labels.dim() - 1), 0, missing)),
            weights=None if self.weights is None else F.pad(self.weights, (0, missing)),
        )

    def pin_memory(self) -> Batch:
        return Batch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=None if self.weights is None else self.weights.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream is done with it; torchrec's train pipelines call this."""
        for part in (self.dense, self.sparse, self.labels, self.weights):
            if part is not None:
                part.record_stream(stream)


class _Lists(NamedTuple):
    """A column of lists, as Arrow holds it: row i is values[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray  # [n + 1], from anywhere
    values: np.ndarray  # [...] int32

    @classmethod
    def of(cls, lengths: np.ndarray, values: np.ndarray) -> _Lists:
        return cls(np.append(0, np.cumsum(lengths)), values)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def flat(self) -> np.ndarray:
        return self.values[self.offsets[0] : self.offsets[-1]]

    def slice(self, start: int, stop: int) -> _Lists:
        return _Lists(self.offsets[start : stop + 1], self.values)

    def take(self, order: np.ndarray) -> _Lists:
        lengths, begins = self.lengths[order], self.offsets[:-1][order]
        before = np.cumsum(lengths) - lengths
        return _Lists.of(lengths, self.values[np.repeat(begins - before, lengths) + np.arange(lengths.sum())])


class _Rows(NamedTuple):
    """Rows column by column, as Parquet gives them and a KeyedJaggedTensor wants them. S columns hold one id a row."""

    dense: np.ndarray  # [I, n] float32
    ids: np.ndarray  # [S, n] int32
    labels: np.ndarray  # [L, n] float32
    weights: np.ndarray  # [W, n] float32
    lists: tuple[_Lists, ...]

    @property
    def size(self) -> int:
        return self.labels.shape[1]

    def slice(self, start: int, stop: int) -> _Rows:
        stop = min(stop, self.size)
        dense, ids, labels, weights = (part[:, start:stop] for part in self[:4])
        return _Rows(dense, ids, labels, weights, tuple(column.slice(start, stop) for column in self.lists))

    def take(self, order: np.ndarray) -> _Rows:
        dense, ids, labels, weights = (part.take(order, axis=1) for part in self[:4])
        return _Rows(dense, ids, labels, weights, tuple(column.take(order) for column in self.lists))


def _concatenate(parts: list[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    dense, ids, labels, weights = (np.concatenate(cells, axis=1) for cells in zip(*(part[:4] for part in parts), strict=True))
    columns = zip(*(part.lists for part in parts), strict=True)
    lists = (
        _Lists.of(np.concatenate([piece.lengths for piece in column]), np.concatenate([piece.flat for piece in column]))
        for column in columns
    )
    return _Rows(dense, ids, labels, weights, tuple(lists))


class _Piece(NamedTuple):
    """Rows start:stop of one row group."""

    path: Source
    row_group: int
    start: int
    stop: int


class ParquetBatches(IterableDataset[Batch]):
    """The batches of one split for one rank; iterate it directly, by BatchLoader, or by torch's DataLoader(batch_size=None).

    Every row of an epoch is in exactly one batch of one rank and worker (with drop_last: in at most one), and all ranks get
    equally many batches, so that collective operations of the model stay in step. Without drop_last the last batches are smaller.

    Args:
        data: the data set's folder, or a URL such as s3://bucket/data.
        split: "train", "val" or "test".
        batch_size: rows in a batch of this rank.
        shuffle: permute row groups and rows anew in every epoch; False keeps the order of the files.
        shuffle_rows: rows in the buffer that is permuted at once. They cost 4 B x (I + C + L + W) each, up to three times at once.
        seed: decides the permutations together with the epoch.
        epochs: passes over the split in one iteration; None = endless.
        rank, world_size: which share of the rows this process takes.
        drop_last: leave out the rows that do not fill a batch on every rank.

    Raises:
        ValueError: an argument out of range; an unlabelled data set; an empty split; fewer rows than one batch needs; a shard that
            does not match the manifest. While iterating: an id outside its table, a label other than 0 or 1,
            a weight below 0 or not finite, an empty cell.
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
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("shuffle_rows", shuffle_rows), ("world_size", world_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1, or None for endless, got {epochs}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1} (world_size {world_size}), got {rank}")
        self.manifest = read_manifest(data)
        self.batch_size, self.shuffle, self.shuffle_rows, self.seed, self.epochs = batch_size, shuffle, shuffle_rows, seed, epochs
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self._dense_names = [column.name for column in self.manifest.integer_columns]
        self._label_names = [label.name for label in self.manifest.labels]
        self._weight_names = [self.manifest.weight.name] if self.manifest.weight else []
        columns = self.manifest.categorical_columns
        self._single_names = [column.name for column in columns if not column.is_list]
        self._list_names = [column.name for column in columns if column.is_list]
        self._num_embeddings = {column.name: column.num_embeddings for column in columns}
        self._row_groups = _row_groups(self.manifest, data, split)
        self.rows = sum(piece.stop for piece in self._row_groups)
        self.batches_per_epoch()  # there must be at least one
        self._next = (0, 0)  # epoch, batch within it
        self._resume_at = (0, 0)

    def batches_per_epoch(self, workers: int = 1) -> int:
        """Batches that each worker of each rank yields per epoch; ValueError if there are too few rows for that."""
        readers = self.world_size * workers
        if self.drop_last:
            batches = self.rows // readers // self.batch_size
        else:
            batches = math.ceil(math.ceil(self.rows / readers) / self.batch_size)
        if not 0 < batches <= self.rows // readers:
            raise ValueError(
                f"batch_size {self.batch_size} on {readers} readers cuts no equal batches from {self.rows} rows; "
                f"lower batch_size, use fewer ranks or workers, or set drop_last=False (it is {self.drop_last})"
            )
        return batches

    def __iter__(self) -> Iterator[Batch]:
        (epoch, batch), self._resume_at = self._resume_at, (0, 0)
        while self.epochs is None or epoch < self.epochs:
            for number, rows in enumerate(self._epoch(epoch, batch), start=batch + 1):
                self._next = (epoch, number)
                yield self._batch(rows)
            epoch, batch = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that iteration gave, and what it depends on. It is the same on every rank."""
        return {"epoch": self._next[0], "batch": self._next[1], **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken.

        Raises:
            ValueError: the batches there were cut differently (batch size, ranks, seed, data), so that the position means nothing.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(f"cannot resume the batches: {name} was {state.get(name)}, not {value}; set it back or start anew")
        self._resume_at = self._next = (state["epoch"], state["batch"])

    def _identity(self) -> dict[str, int]:
        names = ("batch_size", "shuffle", "shuffle_rows", "seed", "world_size", "drop_last", "rows")
        return {name: int(getattr(self, name)) for name in names}

    def _epoch(self, epoch: int, first: int) -> Iterator[_Rows]:
        """The rows of batches first, first + 1, ... of this reader in an epoch."""
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        readers, reader = self.world_size * workers, self.rank * workers + worker_id
        share = (self.rows * reader // readers, self.rows * (reader + 1) // readers)
        count = self.batches_per_epoch(workers)

        def end(batch: int) -> int:
            # Shares differ by a row. Where that would cost a reader its last batch, the batch before gives a row to it.
            full = (batch + 1) * self.batch_size
            return full if self.drop_last else min(full, share[1] - share[0] - (count - 1 - batch))

        position = end(first - 1) if first else 0
        chunks = self._chunks(epoch, share, position)
        if first == count:  # resumed at the epoch's end
            return
        chunk = next(chunks)
        for batch in range(first, count):
            parts, missing, position = [], end(batch) - position, end(batch)
            while missing:
                chunk = chunk if chunk.size else next(chunks)
                parts.append(chunk.slice(0, missing))
                chunk = chunk.slice(missing, chunk.size)
                missing -= parts[-1].size
            yield _concatenate(parts)

    def _chunks(self, epoch: int, share: tuple[int, int], skip: int) -> Iterator[_Rows]:
        """A reader's share of an epoch's rows from its row `skip` on, buffer by buffer, permuted within each."""
        order = np.arange(len(self._row_groups))
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        for start, buffer in self._buffers(order, share):
            size = sum(piece.stop - piece.start for piece in buffer)
            if start - share[0] + size <= skip:
                continue
            rows = _concatenate([self._read(piece) for piece in buffer])
            if self.shuffle:
                # The buffer's first row, counted over all readers, tells it from every other buffer of the epoch.
                rows = rows.take(np.random.default_rng((self.seed, epoch, start)).permutation(size))
            yield rows.slice(max(0, skip - (start - share[0])), size)

    def _buffers(self, order: np.ndarray, share: tuple[int, int]) -> Iterator[tuple[int, list[_Piece]]]:
        """The pieces of the share, grouped so that each group but the last holds shuffle_rows rows, and each group's first row."""
        wanted = self.shuffle_rows if self.shuffle else 1
        begin, buffer, held, position = share[0], [], 0, 0
        for group in (self._row_groups[index] for index in order):
            start, stop = max(share[0] - position, 0), min(share[1] - position, group.stop)
            position += group.stop
            if start >= stop:
                continue
            buffer.append(group._replace(start=start, stop=stop))
            held += stop - start
            if held >= wanted or position >= share[1]:
                yield begin, buffer
                begin, buffer, held = begin + held, [], 0

    def _read(self, piece: _Piece) -> _Rows:
        try:
            is_local = isinstance(piece.path, Path)
            with pq.ParquetFile(open_ranges(piece.path), memory_map=is_local, pre_buffer=not is_local) as file:
                columns = [*self._label_names, *self._weight_names, *self._dense_names, *self._single_names, *self._list_names]
                # Decoding runs outside Python's lock, so a training thread beside this one is not held up.
                table = file.read_row_group(piece.row_group, columns=columns).slice(piece.start, piece.stop - piece.start)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{piece.path}, row group {piece.row_group}, cannot be read ({error}); {_REMEDY}") from error
        for name in columns:
            column = table.column(name)
            if column.null_count or (name in self._list_names and any(chunk.flatten().null_count for chunk in column.chunks)):
                raise ValueError(f"{piece.path}: column {name} has an empty cell in row group {piece.row_group}; {_REMEDY}")
        dense, labels, weights = (
            _stacked(table, names, np.float32) for names in (self._dense_names, self._label_names, self._weight_names)
        )
        ids = _stacked(table, self._single_names, np.int32)
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(f"{piece.path}: labels in row group {piece.row_group} are not all 0 or 1; {_REMEDY}")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(f"{piece.path}: weights in row group {piece.row_group} are not all finite and at least 0; {_REMEDY}")
        lists = []
        for name in self._list_names:
            column = table.column(name).combine_chunks()
            lists.append(_Lists(column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)))
        of_columns = [*zip(self._single_names, ids, strict=True), *zip(self._list_names, (of.flat for of in lists), strict=True)]
        for name, of_column in of_columns:
            limit = self._num_embeddings[name]
            if of_column.size and not 0 <= of_column.min() <= of_column.max() < limit:
                wrong = of_column[~((of_column >= 0) & (of_column < limit))][0]
                raise ValueError(f"{piece.path}: table {name}: id {wrong} is not in 0..{limit - 1}; {_REMEDY}")
        return _Rows(dense, ids, labels, weights, tuple(lists))

    def _batch(self, rows: _Rows) -> Batch:
        size, singles = rows.size, len(self._single_names)
        lengths, offsets = _one_per_row(singles, size)
        values = rows.ids.astype(np.int64).ravel()
        length_per_key = [size] * singles
        if rows.lists:
            values = np.concatenate([values, *(column.flat for column in rows.lists)])
            lengths = torch.cat([lengths, *(torch.from_numpy(column.lengths.astype(np.int64)) for column in rows.lists)])
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            length_per_key += [len(column.flat) for column in rows.lists]
        sparse = KeyedJaggedTensor(
            keys=self._single_names + self._list_names,
            values=torch.from_numpy(values),
            lengths=lengths,
            offsets=offsets,
            stride=size,
            length_per_key=length_per_key,
            offset_per_key=[0, *itertools.accumulate(length_per_key)],
        )
        # The copies let go of the buffer that the rows are a view of.
        dense = torch.from_numpy(np.ascontiguousarray(rows.dense.T))
        labels = rows.labels[0].copy() if len(rows.labels) == 1 else np.ascontiguousarray(rows.labels.T)
        weights = torch.from_numpy(rows.weights[0].copy()) if len(rows.weights) else None
        return Batch(dense=dense, sparse=sparse, labels=torch.from_numpy(labels), weights=weights)


def _stacked(table: pa.Table, names: Sequence[str], dtype: npt.DTypeLike) -> np.ndarray:
    """Columns of numbers as [columns, n]."""
    stacked = np.empty((len(names), len(table)), dtype)
    for row, name in zip(stacked, names, strict=True):
        row[:] = table.column(name).to_numpy()
    return stacked


@functools.lru_cache(maxsize=4)
def _one_per_row(keys: int, size: int) -> tuple[Tensor, Tensor]:
    """lengths and offsets of a KeyedJaggedTensor with one id everywhere; batches share them, nothing writes to them."""
    return torch.ones(keys * size, dtype=torch.int64), torch.arange(keys * size + 1, dtype=torch.int64)


def _is_lists(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_int32(kind.value_type)


def _row_groups(manifest: Manifest, data: str | Path, split: str) -> list[_Piece]:
    """The split's row groups in the order of its files, after comparing every file's size, rows and columns with the manifest."""
    if split not in manifest.splits:
        raise ValueError(f"split {split!r} is not in {data}; it has {', '.join(manifest.splits)}")
    if manifest.label is None:
        raise ValueError(f"{data} has no labels, so it can neither be trained nor evaluated on; preprocess logs with labels")
    if manifest.splits[split].rows == 0:
        raise ValueError(f"split {split} of {data} is empty; preprocess more rows or give {split} a larger fraction of them")
    check_shards(manifest, data)
    types = {label.name: pa.types.is_integer for label in manifest.labels}
    types |= {manifest.weight.name: pa.types.is_float32} if manifest.weight else {}
    types |= {column.name: pa.types.is_float32 for column in manifest.integer_columns}
    types |= {column.name: _is_lists if column.is_list else pa.types.is_int32 for column in manifest.categorical_columns}
    pieces = []
    for shard in manifest.splits[split].shards:
        path = join(data, shard.path)
        try:
            footer = pq.read_metadata(open_ranges(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path} is not a readable Parquet file ({error}); {_REMEDY}") from error
        if footer.num_rows != shard.rows:
            raise ValueError(f"{path} has {footer.num_rows} rows, the manifest states {shard.rows}; {_REMEDY}")
        schema = footer.schema.to_arrow_schema()
        for name, matches in types.items():
            if name not in schema.names:
                raise ValueError(f"{path} has no column {name}, but the manifest lists it; {_REMEDY}")
            if not matches(schema.field(name).type):
                raise ValueError(
                    f"{path}: column {name} is of type {schema.field(name).type}, which training does not read; {_REMEDY}"
                )
        pieces += [_Piece(path, group, 0, footer.row_group(group).num_rows) for group in range(footer.num_row_groups)]
    return [piece for piece in pieces if piece.stop]


def require_one_label(batches: ParquetBatches) -> ParquetBatches:
    """Return batches after making sure that a loss over one label passes over nothing that they hold.

    Raises:
        ValueError: the data set has several labels, or weights.
    """
    labels, weight = batches.manifest.labels, batches.manifest.weight
    if len(labels) > 1 or weight:
        held = (
            f"the labels {', '.join(label.name for label in labels)}" if len(labels) > 1 else f"weights ({weight and weight.name})"
        )
        raise ValueError(f"the data set has {held}, which are not used yet; preprocess with one label and without weights")
    return batches


class BatchLoader:
    """Reads a ParquetBatches ahead of its consumer in one background thread, and knows the position of the batch last given out.

    A thread is enough because decoding, permuting and copying run outside Python's lock, and it keeps batches out of inter-process
    queues. Leaving the loop ends the thread.

    Args:
        batches: what to read; one loader at a time may iterate it.
        prefetch: batches held ready.
        pin_memory: put them in page-locked memory, for asynchronous copies to a GPU.
        prepare: called with every batch by the thread, before it is held ready; to plan its lookups, say.

    Raises:
        ValueError: prefetch below 1. Iterating raises what reading raises.
    """

    def __init__(
        self,
        batches: ParquetBatches,
        *,
        prefetch: int = 4,
        pin_memory: bool = False,
        prepare: Callable[[Batch], object] | None = None,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1 batch, got {prefetch}")
        self.batches, self.prefetch, self.pin_memory, self.prepare = batches, prefetch, pin_memory, prepare
        self._state = batches.state_dict()

    def __iter__(self) -> Generator[Batch]:
        ready: queue.Queue[tuple[Batch, dict[str, int]] | BaseException | None] = queue.Queue(self.prefetch)
        left = threading.Event()

        def put(item: tuple[Batch, dict[str, int]] | BaseException | None) -> None:
            while not left.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def read() -> None:
            try:
                for batch in self.batches:
                    if self.prepare is not None:
                        self.prepare(batch)
                    put((batch.pin_memory() if self.pin_memory else batch, self.batches.state_dict()))
                    if left.is_set():
                        return
                put(None)
            except BaseException as error:  # handed to the consumer, who raises it
                put(error)

        thread = threading.Thread(target=read, name="BatchLoader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                batch, self._state = item
                yield batch
        finally:
            left.set()
            thread.join()

    def state_dict(self) -> dict[str, int]:
        """The position after the batch last given out; whatever was read ahead of it will be read again."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken. Raises ValueError if the batches were cut differently there."""
        self.batches.load_state_dict(state)
        self._state = self.batches.state_dict()
