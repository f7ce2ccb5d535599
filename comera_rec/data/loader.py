"""Batches read ahead of their consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator

from comera_rec.data.batch import Batch
from comera_rec.data.batches import ParquetBatches
from data_pipeline.errors import UserError


class BatchLoader:
    """Reads a ParquetBatches ahead of its consumer in one background thread, and knows the position of the last batch yielded.

    A thread is enough because decoding, permuting and copying run outside Python's lock, and it keeps batches out of inter-process
    queues. Leaving the loop ends the thread.

    Args:
        batches: what to read; one loader at a time may iterate it.
        prefetch: batches read ahead and kept.
        pin_memory: put them in page-locked memory, for asynchronous copies to a GPU.
        prepare: called with every batch by the thread, before the consumer gets it; for example to plan its lookups.

    Raises:
        ValueError: if prefetch is below 1. Iterating raises the errors of reading.
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
            raise UserError(f"prefetch must be at least 1 batch, got {prefetch}")
        self.batches, self.prefetch, self.pin_memory, self.prepare = batches, prefetch, pin_memory, prepare
        self._state = batches.state_dict()

    def __iter__(self) -> Generator[Batch]:
        ready: queue.Queue[tuple[Batch, dict[str, int]] | BaseException | None] = queue.Queue(self.prefetch)
        stopped = threading.Event()

        def put(item: tuple[Batch, dict[str, int]] | BaseException | None) -> None:
            while not stopped.is_set():
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
                    if stopped.is_set():
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
            stopped.set()
            thread.join()

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch yielded; batches read ahead of it will be read again."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken; errors as `ParquetBatches.load_state_dict`."""
        self.batches.load_state_dict(state)
        self._state = self.batches.state_dict()
