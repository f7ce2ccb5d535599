"""A writer of checkpoints, in the step that asks for one or by a thread during the following steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.staging import BlockingAsyncStager

from comera_rec.distributed import Processes
from comera_rec.training.checkpoint import save_checkpoint


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. With several processes, each calls the same methods at the same step.

    Args:
        asynchronous: let `save` return as soon as the tensors are copied (in memory, for as long as the write takes); a thread
            writes, in a separate process group. A write that failed shows in `failed`, and is raised by the next `wait` or `save`.
    """

    def __init__(self, folder: Path, *, keep: int, processes: Processes, asynchronous: bool) -> None:
        self._folder, self._keep = folder, keep
        self._processes = processes.separate_group() if asynchronous else processes
        self._thread = ThreadPoolExecutor(1, "CheckpointWriter") if asynchronous else None
        self._writing: Future[Path] | None = None

    def save(self, step: int, record: dict[str, Any], tensors: Mapping[str, Any], *, kept_step: int | None) -> None:
        """Write a checkpoint once the previous one is written; arguments and errors as for `save_checkpoint`."""
        self.wait()
        options: dict[str, Any] = {"keep": self._keep, "kept_step": kept_step, "processes": self._processes}
        if self._thread is None:
            save_checkpoint(self._folder, step, record, tensors, **options)
        else:
            copies = BlockingAsyncStager().stage(dict(tensors))
            self._writing = self._thread.submit(save_checkpoint, self._folder, step, copy.deepcopy(record), copies, **options)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Wait for the write; raise its error unless the block has raised another."""
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether the current write has failed."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is being written; if the write failed, raise its error, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
