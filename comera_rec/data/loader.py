"""Batches read ahead of their consumer."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from comera_rec.data.batch import Batch
from comera_rec.data.batches import ParquetBatches, read_ahead


class BatchLoader:
    """Reads a ParquetBatches ahead of its consumer in one background thread, and knows the position of the last batch yielded.

    A thread is enough because decoding, permuting and copying run outside Python's lock, and it keeps batches out of inter-process
    queues. Leaving the loop ends the thread.

    Args:
        batches: what to read; one loader at a time may iterate it.
        prefetch: batches read ahead and kept, at least 1.
        pin_memory: put them in page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(self, batches: ParquetBatches, *, prefetch: int = 4, pin_memory: bool = False) -> None:
        self.batches, self.prefetch, self.pin_memory = batches, prefetch, pin_memory
        self._state = batches.state_dict()

    def __iter__(self) -> Generator[Batch]:
        def with_state(batch: Batch) -> tuple[Batch, dict[str, int]]:
            return batch.pin_memory() if self.pin_memory else batch, self.batches.state_dict()

        thread = ThreadPoolExecutor(1, "BatchLoader")
        try:
            for batch, state in read_ahead(map(with_state, self.batches), thread, self.prefetch):
                self._state = state
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch yielded; batches read ahead of it will be read again."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken; errors as `ParquetBatches.load_state_dict`."""
        self.batches.load_state_dict(state)
        self._state = self.batches.state_dict()
