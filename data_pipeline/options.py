"""Options of passes over logs, and of `comera preprocess`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from data_pipeline.atomic import refuse_overlap
from data_pipeline.errors import UserError
from data_pipeline.manifest import Order
from data_pipeline.schema import Column, LogSchema
from data_pipeline.sources import Source, refuse_twice
from data_pipeline.splits import SplitKind, Splitting

_MIB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": _MIB, "G": 1 << 30, "T": 1 << 40}
# Memory of a run before it holds any part: Python, NumPy, Arrow and compiled kernels.
_BASE_BYTES = 224 * _MIB
# Memory of a worker: a row group while it is written, and for each byte of a part its text, that of the next one, and arrays,
# which are largest if most cells are empty.
_WORKER_BYTES = 32 * _MIB
_BYTES_PER_TEXT = 16
_LEAST_TABLE_BYTES = 96 * _MIB
_BYTES_PER_MERGED_ENTRY = 64


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Options of every pass over logs.

    Args:
        inputs: logs in chronological order, as paths or URLs.
        output: a new or empty folder, or a file, to write.
        max_bad_rows: how many malformed lines to drop before the run stops with an error.
        overwrite: replace a finished output.
        part_bytes: bytes of text in a part, the unit of work; a shard holds a part's rows, about 70,000 of Criteo's in 16 MiB.
        memory_limit: bytes of memory to stay below; limits how many parts are processed at once, and how much of the vocabularies
            stays in memory.
        workers: the most threads to use; None for one per core.
        scheduler: address of a Dask scheduler whose workers replace threads, or "local" for processes on this machine.

    Raises:
        ValueError: an option is out of range.
    """

    inputs: tuple[Source, ...]
    output: Path
    max_bad_rows: int = 0
    overwrite: bool = False
    part_bytes: int = 16 * _MIB
    memory_limit: int = 2048 * _MIB
    workers: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UserError("`input` names no file; give at least one")
        refuse_overlap(self.output, "input", self.inputs)
        refuse_twice(self.inputs)
        self._check_at_least(max_bad_rows=0, part_bytes=1, workers=1)
        needed, least = _BASE_BYTES + self._worker_bytes, _BASE_BYTES + _WORKER_BYTES
        if self.memory_limit < needed:
            smaller = "or lower `part_bytes`" if self.memory_limit > least else f"as any parts need more than {format_bytes(least)}"
            raise UserError(
                f"`memory_limit` {format_bytes(self.memory_limit)} is too little for parts of {format_bytes(self.part_bytes)}, "
                f"which need {format_bytes(needed)}; raise it, {smaller}"
            )

    def _check_at_least(self, **bounds: int) -> None:
        for name, least in bounds.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise UserError(f"`{name}` is {number}; it must be at least {least}")

    @property
    def threads(self) -> int:
        """How many parts to process at once, as cores and memory allow."""
        cores = self.workers or len(os.sched_getaffinity(0))
        return min(cores, (self.memory_limit - _BASE_BYTES) // self._worker_bytes)

    @property
    def table_bytes(self) -> int:
        """The most bytes of vocabularies to hold in memory while parts are encoded, in addition to the parts."""
        return max(self.memory_limit - _BASE_BYTES - self.threads * self._worker_bytes, self.threads * _LEAST_TABLE_BYTES)

    @property
    def table_room(self) -> dict[str, int]:
        """`room` and `threads` for `open_encoder`: each process gets a share of the room; threads share all of it."""
        if self.scheduler:
            return {"room": self.table_bytes // self.threads, "threads": 1}
        return {"room": self.table_bytes, "threads": self.threads}

    @property
    def _worker_bytes(self) -> int:
        return _BYTES_PER_TEXT * self.part_bytes + _WORKER_BYTES

    @property
    def merged_entries(self) -> int:
        """The most entries of sorted runs that a thread may hold while it merges."""
        return (self.memory_limit - _BASE_BYTES) // self.threads // _BYTES_PER_MERGED_ENTRY

    @property
    def order_bytes(self) -> int:
        """The most bytes to use while values are put in an order of similarity."""
        return self.memory_limit - _BASE_BYTES


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(PassOptions, Splitting):
    """What to read, how to split it, and how to encode it.

    Args:
        schema: the logs' columns; None for Criteo's, with or without label as the first log's lines have it.
        min_count: how often a category value must occur in training rows to get an id; rarer values share id 0. The default of 2
            leaves out values seen once: they say nothing about other rows, while together they train the row of id 0, which
            every value unseen in training will use.
        min_counts: the same for single columns, by name.
        order: the order of ids: by frequency, or by similarity within bands of frequency (`data_pipeline.similarity`).
        hash_buckets: give every category value an id of 1..hash_buckets - 1 by its hash, and count none.

    Raises:
        ValueError: an option is out of range.
    """

    schema: LogSchema | None = None
    min_count: int = 2
    min_counts: Mapping[str, int] = field(default_factory=dict)
    order: Order = "frequency"
    hash_buckets: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(min_count=1, seed=0, hash_buckets=2)
        if self.seed >= 1 << 64:
            raise UserError(f"`seed` is {self.seed}; it must be below 2**64")
        for name, count in self.min_counts.items():
            if count < 1:
                raise UserError(f"`min_count` {name}={count}: it must be at least 1")
        if self.hash_buckets is not None and self.hash_buckets > 1 << 31:
            raise UserError(f"`hash_buckets` is {self.hash_buckets}; ids are 32-bit integers, so it must be at most {1 << 31}")
        for name, choices in (("order", get_args(Order)), ("split", get_args(SplitKind))):
            if getattr(self, name) not in choices:
                raise UserError(f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if self.order == "similarity" and self.hash_buckets is not None:
            raise UserError("`order` similarity needs values that are counted, which `hash_buckets` are not; leave one out")
        if self.split == "day" and len(self.inputs) < 2:
            raise UserError("`split` day needs several logs, of which it validates and tests on the last; `input` names one")
        in_order = self.val_from is not None and self.test_from is not None and self.val_from <= self.test_from
        if (self.val_from, self.test_from) != (None, None) and self.split != "time":
            raise UserError("`val_from` and `test_from` need `split` time")
        if self.split == "time" and not in_order:
            raise UserError("`split` time needs `val_from` and `test_from`; give both, with `val_from` no later than `test_from`")
        for name in ("val_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"`{name}` is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.val_fraction + self.test_fraction >= 1:
            raise UserError(
                f"`val_fraction` {self.val_fraction} and `test_fraction` {self.test_fraction} leave no training rows; "
                "their sum must be below 1"
            )

    def buckets_of(self, column: Column) -> int | None:
        """Return the hash buckets of a categorical column; None if it has a vocabulary."""
        return self.hash_buckets if column.hash_buckets is None else column.hash_buckets

    def recorded(self) -> dict[str, Any]:
        """Return the options that the manifest records: those that took effect, defaults included."""
        names = ["split"]
        names += ["val_fraction", "test_fraction"] if self.split in ("chronological", "random") else []
        names += ["val_from", "test_from"] if self.split == "time" else []
        names += ["seed"] if self.split == "random" else []
        names += ["min_count"] if self.hash_buckets is None else ["hash_buckets"]
        return {name: getattr(self, name) for name in (*names, "part_bytes", "max_bad_rows")}


def parse_bytes(text: str) -> int:
    """Parse a size such as 64MiB, 2G or 1048576 as bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise UserError(f"{text!r} is not a size; write it like 64MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """Format a size for people: 64 MiB."""
    unit = next(unit for unit in ("T", "G", "M", "K", "") if size >= _UNITS[unit] or not unit)
    return f"{size / _UNITS[unit]:.4g} {unit + 'iB' if unit else 'bytes'}"
