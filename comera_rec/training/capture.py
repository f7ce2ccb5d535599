"""An update that becomes one CUDA graph: forward, backward, optimizer and the price of ranks in a single launch.

    update = CapturedUpdate(update, [optimizer], CudaRecorder(device))
    for batch in batches:
        loss = update(batch)

The first calls run eagerly, because lookups and optimizers allocate their state in their first steps; then a call is captured and
replayed, and the next ones only copy their batches and replay.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from comera_rec.data import Batch
from comera_rec.data.batch import has_one_per_row
from comera_rec.distributed import WORLD

WARMUP = 3
"""Eager updates on batches of the same shapes before one is captured."""


class CudaRecorder:
    """A side stream, on which updates run before and while they are captured, and the graph captured last.

    Autograd ties gradients to the stream of their first step, so eager updates run where the captured one will.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a call eagerly on the side stream."""
        self._graph = None
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call()
        current.wait_stream(self._stream)
        return result

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Record a call without running it; its result is valid after `replay`."""
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are checked, because the thread that reads batches ahead may pin memory meanwhile.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return call()

    def replay(self) -> None:
        """Run the captured graph."""
        assert self._graph is not None
        self._graph.replay()


def why_not_captured(optimizer: Optimizer, rates_vary: bool) -> str | None:
    """Return why updates with an optimizer can't be captured; None if they can."""
    if WORLD.several:
        return "several processes train together"
    for group in optimizer.param_groups:
        # Without decay, an Adagrad's rule doesn't depend on the number of the step, which is kept on the host.
        is_constant = not (rates_vary or isinstance(group["lr"], Tensor))
        is_adagrad = type(optimizer) is Adagrad and not group["lr_decay"] and is_constant
        if not (is_adagrad or ("capturable" in group and (group["capturable"] or group.get("fused")))):
            return f"{type(optimizer).__name__} can't be captured so; Adam and AdamW can, and Adagrad with constant rates"
    return None


class CapturedUpdate:
    """Runs an update as a CUDA graph, captured again after batches of other shapes or a learning rate set to another number.

    Batches whose shapes change every time therefore run eagerly.

    Args:
        update: batch -> its loss. Python values in it stay as they were when captured; it must not wait for the
            device.
        optimizers: all of the model: with `fused=True` or `capturable=True`, Adagrad without decay, or those of FBGEMM's tables. If
            learning rates follow a schedule, make them tensors, which a graph reads in every step; Adagrad and FBGEMM's tables
            can't read tensors there. Steps that Adagrad counts, which its rule doesn't need, stand still during replays.
        recorder: what captures and replays.
        on_failure: called with the error if a capture fails, after which all updates run eagerly; None raises it.
    """

    def __init__(
        self,
        update: Callable[[Batch], Tensor],
        optimizers: Sequence[Optimizer],
        recorder: CudaRecorder,
        on_failure: Callable[[RuntimeError], None] | None = None,
    ) -> None:
        self._update, self._optimizers, self._recorder, self._on_failure = update, optimizers, recorder, on_failure
        self._captures = True
        self.reset()

    def reset(self) -> None:
        """Forget the graph; call it after parameters or optimizer state were replaced, by truncated ranks or a loaded state."""
        self._last_layout: object = None
        self._repeats = 0  # calls in a row with that layout
        self._batch: Batch | None = None  # the graph's buffers
        self._loss: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Update the model; return the loss, which stays on the device. The batch's memory may become the graph's."""
        rates = [group["lr"] for each in self._optimizers for group in each.param_groups]
        layout = _layout(batch), [id(rate) if isinstance(rate, Tensor) else rate for rate in rates]
        if layout != self._last_layout:
            self.reset()
            self._last_layout = layout
        if self._batch is None:
            self._repeats += 1
            if self._repeats <= WARMUP or not self._captures:
                return self._recorder.run(lambda: self._update(batch))
            self._batch = batch
            try:
                with _capturable(self._optimizers):
                    self._loss = self._recorder.capture(lambda: self._update(batch))
            except RuntimeError as error:
                if self._on_failure is None:
                    raise
                self._on_failure(error)
                self._captures, self._batch = False, None
            if self._batch is None:  # after the error, which refers to the memory of the failed capture
                return self._recorder.run(lambda: self._update(batch))
        else:
            for tensor, value in zip(_tensors(self._batch), _tensors(batch), strict=True):
                if tensor is not value:  # batches share constants
                    tensor.copy_(value, non_blocking=True)
        self._recorder.replay()
        assert self._loss is not None
        return self._loss.clone()  # the next replay writes over it


def _tensors(batch: Batch) -> list[Tensor]:
    ids = batch.sparse
    tensors = (batch.dense, batch.labels, batch.weights, ids.values(), ids.lengths(), ids.offsets(), ids.weights_or_none())
    return [tensor for tensor in tensors if tensor is not None]


def _layout(batch: Batch) -> Hashable:
    """Return what two batches must have in common for one graph to serve both."""
    sizes, sparse = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch)), batch.sparse
    return sizes, tuple(sparse.keys()), tuple(sparse.length_per_key()), has_one_per_row(sparse)  # what is shared isn't written


@contextmanager
def _capturable(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Set the optimizers' flag `capturable` during a capture; outside of one, the flag causes warnings and slows down steps."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "capturable" in group]
    flags = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, flag in zip(groups, flags, strict=True):
            group["capturable"] = flag
