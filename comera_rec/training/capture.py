"""An update that becomes one CUDA graph: forward, backward, optimizer and the price of ranks in a single launch.

    update = CapturedUpdate(update, optimizer, CudaRecorder(device))
    for batch in batches:
        loss = update(batch)

The first calls run eagerly, because lookups and optimizers allocate their state in their first steps; then a call is captured and
replayed, and the next ones only copy their batches and replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from comera_rec.data import Batch
from comera_rec.distributed import WORLD
from data_pipeline.errors import UserError

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


class CapturedUpdate:
    """Runs an update as a CUDA graph, captured again after batches of other shapes or a learning rate set to another number.

    Batches whose shapes change every time therefore run eagerly.

    Args:
        update: batch -> its loss. Python values in it stay as they were when captured; it must not wait for the
            device.
        optimizer: the model's optimizer, made with `fused=True` or `capturable=True`, or Adagrad without decay. If learning rates
            follow a schedule, make them tensors, which a graph reads in every step; Adagrad can't read tensors there. Steps that
            Adagrad counts, which its rule doesn't need, stand still during replays.
        recorder: what captures and replays.

    Raises:
        ValueError: if the optimizer can't be captured, or several processes train together.
    """

    def __init__(self, update: Callable[[Batch], Tensor], optimizer: Optimizer, recorder: CudaRecorder) -> None:
        if WORLD.several:
            raise UserError("capture is on and several processes train together: set training.capture=false")
        for group in optimizer.param_groups:
            # Without decay, an Adagrad's rule doesn't depend on the number of the step, which is kept on the host.
            is_adagrad = type(optimizer) is Adagrad and not group["lr_decay"] and not isinstance(group["lr"], Tensor)
            if not (is_adagrad or ("capturable" in group and (group["capturable"] or group.get("fused")))):
                raise UserError(
                    f"capture is on and a step of {type(optimizer).__name__} with these settings can't be captured: build Adam or "
                    "AdamW with fused=True, or Adagrad with constant rates, or set training.capture=false"
                )
        self._update, self._optimizer, self._recorder = update, optimizer, recorder
        self.reset()

    def reset(self) -> None:
        """Forget the graph; call it after parameters or optimizer state were replaced, by truncated ranks or a loaded state."""
        self._last_layout: Hashable = None
        self._repeats = 0  # calls in a row with that layout
        self._batch: Batch | None = None  # the graph's buffers
        self._loss: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Update the model; return the loss, which stays on the device. The batch's memory may become the graph's."""
        layout = _layout(batch), tuple(_constant(group["lr"]) for group in self._optimizer.param_groups)
        if layout != self._last_layout:
            self.reset()
            self._last_layout = layout
        if self._batch is None:
            self._repeats += 1
            if self._repeats <= WARMUP:
                return self._recorder.run(lambda: self._update(batch))
            self._batch = batch
            with _capturable(self._optimizer):
                self._loss = self._recorder.capture(lambda: self._update(batch))
        else:
            for tensor, value in zip(_tensors(self._batch), _tensors(batch), strict=True):
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
    sizes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))
    return sizes, tuple(batch.sparse.keys()), tuple(batch.sparse.length_per_key())


def _constant(rate: float | Tensor) -> Hashable:
    return id(rate) if isinstance(rate, Tensor) else rate


@contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Set an optimizer's flag `capturable` during a capture; outside of one, the flag causes warnings and slows down steps."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    flags = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, flag in zip(groups, flags, strict=True):
            group["capturable"] = flag
