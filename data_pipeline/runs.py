"""Value counts as sorted runs on disk, counted and merged in bounded memory.

A run is two files, `<name>.keys` and `<name>.counts`: column by column, its distinct keys, ascending, and their counts. A file is
open only while a block of it is read, so the number of runs is not limited.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.atomic import replacing

Counted = tuple[np.ndarray, np.ndarray]  # ascending keys and their uint64 counts
_COUNT = np.dtype(np.uint64)
# Runs merged at once; more are merged in levels. Each run's buffer should be large enough to amortize a disk seek.
FAN_IN = 128


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on disk; if `trains` is false, its counts are read as 0.

    name: of its files, without suffix.
    lengths: the number of entries of each column.
    count_bytes: bytes per count; 4 are usually enough.
    """

    name: str
    lengths: tuple[int, ...]
    count_bytes: int = _COUNT.itemsize
    trains: bool = True

    def read(self, folder: Path, column: int, start: int, stop: int, key_dtype: np.dtype) -> Counted:
        """Read entries of a column."""
        first = sum(self.lengths[:column]) + start
        keys = np.fromfile(folder / f"{self.name}.keys", key_dtype, stop - start, offset=first * key_dtype.itemsize)
        if not self.trains:
            return keys, np.zeros(len(keys), _COUNT)
        counts = np.fromfile(folder / f"{self.name}.counts", f"u{self.count_bytes}", stop - start, offset=first * self.count_bytes)
        return keys, counts.astype(_COUNT)


def write_run(path: Path, columns: Iterable[Iterable[Counted]], *, count_bytes: int = _COUNT.itemsize) -> Run:
    """Write a run from each column's blocks, whose keys ascend."""
    with ExitStack() as stack:
        paths = [stack.enter_context(replacing(Path(f"{path}.{suffix}"))) for suffix in ("keys", "counts")]
        keys_file, counts_file = [stack.enter_context(path.open("wb")) for path in paths]
        lengths = []
        for blocks in columns:
            lengths.append(0)
            for keys, counts in blocks:
                lengths[-1] += len(keys)
                keys_file.write(keys.data)  # ndarray.tofile ignores a full disk
                counts_file.write(counts.astype(f"u{count_bytes}").data)
    return Run(name=path.name, lengths=tuple(lengths), count_bytes=count_bytes)


def count_keys(keys: np.ndarray) -> Counted:
    """Return the distinct keys and their counts, as `np.unique` does in twice the memory."""
    keys = np.sort(keys)
    starts = _starts(keys)
    return keys[starts], np.diff(starts, append=len(keys)).astype(_COUNT)


def _joined(runs: Sequence[Counted]) -> Counted:
    """Merge runs, adding the counts of equal keys."""
    keys, counts = (np.concatenate(of_runs) for of_runs in zip(*runs, strict=True))
    order = np.argsort(keys, kind="stable")  # which merges what is sorted already
    keys, counts = keys[order], counts[order]
    starts = _starts(keys)
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def _starts(keys: np.ndarray) -> np.ndarray:
    """Return where each distinct key of a sorted array starts."""
    return np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])


def merge(runs: Sequence[Run], folder: Path, column: int, *, key_dtype: np.dtype, entries: int) -> Iterator[Counted]:
    """Yield the merged values of a column, ascending, block by block.

    Args:
        runs: at most `FAN_IN`, to keep the buffers large.
        entries: the most entries of all buffers together.
    """
    lengths = [run.lengths[column] for run in runs]
    buffer = max(1, entries // max(len(runs), 1))
    buffers: list[Counted] = [(np.empty(0, key_dtype), np.empty(0, _COUNT))] * len(runs)
    read = [0] * len(runs)
    while True:
        for number, run in enumerate(runs):
            if not len(buffers[number][0]) and read[number] < lengths[number]:
                stop = min(read[number] + buffer, lengths[number])
                buffers[number] = run.read(folder, column, read[number], stop, key_dtype)
                read[number] = stop
        # All keys up to the least last key of the unfinished runs' buffers have been read.
        bounds = [keys[-1] for (keys, _), done, length in zip(buffers, read, lengths, strict=True) if done < length]
        below = []
        for number, (keys, counts) in enumerate(buffers):
            cut = int(np.searchsorted(keys, min(bounds), side="right")) if bounds else len(keys)
            below.append((keys[:cut], counts[:cut]))
            buffers[number] = keys[cut:], counts[cut:]
        if below:
            yield _joined(below)
        if not bounds:
            return


def merge_in_levels(
    runs: Sequence[Run], folder: Path, *, columns: int, key_dtype: np.dtype, entries: int, workers: int
) -> Sequence[Run]:
    """Merge runs until at most `FAN_IN` are left. The given runs stay in the folder, so an interrupted merge can be repeated.

    Args:
        entries: the most entries that a worker may hold.
    """
    level = 0
    while len(runs) > FAN_IN:

        def merged(first: int, runs: Sequence[Run] = runs, level: int = level) -> Run:
            group = runs[first : first + FAN_IN]
            columns_of_group = (merge(group, folder, column, key_dtype=key_dtype, entries=entries) for column in range(columns))
            return write_run(folder / f"merged-{level}-{first:07d}", columns_of_group)

        with ThreadPoolExecutor(workers) as pool:
            larger = list(pool.map(merged, range(0, len(runs), FAN_IN)))
        for run in runs if level else ():
            for suffix in ("keys", "counts"):
                (folder / f"{run.name}.{suffix}").unlink()
        runs, level = larger, level + 1
    return runs
