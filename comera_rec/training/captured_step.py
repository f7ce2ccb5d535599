"""A training step that becomes one CUDA graph: forward, backward, update and the price of ranks in a single launch.

    step = CapturedStep(loss_of, optimizer, scheduler)
    for batch in batches:
        loss = step(batch.dense, batch.sparse, batch.labels)

Every call is one step on its inputs. The first calls run eagerly, because lookups and optimizers allocate their state in their
first steps; then a call is captured and replayed, and the next ones only copy their inputs and replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchrec import KeyedJaggedTensor

from comera_rec.distributed import WORLD
from comera_rec.rank import RankScheduler

Input: TypeAlias = Tensor | KeyedJaggedTensor


class CapturedStep:
    """Forward, backward, optimizer and rank scheduler, with all but the scheduler's truncations in a CUDA graph.

    The graph is captured again when it is no longer valid: after inputs of other shapes, a learning rate set to another number, and
    any change that the scheduler records (truncated ranks, a new stage). Inputs whose shapes change with every batch therefore run
    eagerly. On the CPU every step does.

    Args:
        loss_of: inputs -> task loss, a scalar. Python values that are not its inputs stay as they were when captured; it must not
            wait for the device.
        optimizer: the model's optimizer, made with `fused=True` or `capturable=True`. If the learning rate follows a schedule, make
            it a tensor, which a graph reads in every step.
        scheduler: the rank schedule, if there is one.
        capture: False runs every step eagerly.
        clip: called after backward, before the optimizer's step.
        accumulation: parts whose gradients add up to a step; a call has the inputs of all parts, one after the other.
        warmup: eager steps on inputs of the same shapes before one is captured.

    Raises:
        ValueError: if the optimizer can't be captured, several processes train together, or `warmup` is below 1.
    """

    def __init__(
        self,
        loss_of: Callable[..., Tensor],
        optimizer: Optimizer,
        scheduler: RankScheduler | None = None,
        *,
        capture: bool = True,
        clip: Callable[[], object] | None = None,
        accumulation: int = 1,
        warmup: int = 3,
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup is {warmup}: give at least 1 eager step, in which optimizers make their state")
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._clip = clip
        self._accumulation = accumulation
        self._warmup = warmup
        device = optimizer.param_groups[0]["params"][0].device
        self._recorder: CudaRecorder | None = None
        if capture and device.type == "cuda":
            _require_capturable(optimizer)
            self._recorder = CudaRecorder(device)
        self.reset()

    def reset(self) -> None:
        """Forget the graph; call it after parameters or optimizer state were replaced, such as by loading a state dict."""
        self._last_layout: Hashable = None
        self._repeats = 0  # calls in a row with that layout
        self._inputs: tuple[Input, ...] | None = None  # the graph's buffers
        self._loss: Tensor | None = None

    def __call__(self, *inputs: Input) -> Tensor:
        """Take one step; return the task loss, the mean over its parts, which stays on the device."""
        loss = self._step(*inputs) if self._recorder is None else self._recorded(self._recorder, inputs)
        if self._scheduler is not None and self._scheduler.step():
            self.reset()
        return loss

    def _step(self, *inputs: Input) -> Tensor:
        self._optimizer.zero_grad()  # to None, so that a graph writes gradients instead of adding to them
        losses = []
        for part in zip(*[iter(inputs)] * (len(inputs) // self._accumulation), strict=True):
            losses.append(self._loss_of(*part))
            if self._scheduler is not None:
                objective = self._scheduler.loss(losses[-1], accumulation=self._accumulation)
            else:
                objective = losses[-1] / self._accumulation
            objective.backward()
        if self._clip is not None:
            self._clip()
        self._optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean()

    def _recorded(self, recorder: CudaRecorder, inputs: tuple[Input, ...]) -> Tensor:
        layout = tuple(map(_layout, inputs)), tuple(_constant(group["lr"]) for group in self._optimizer.param_groups)
        if layout != self._last_layout:
            self.reset()
            self._last_layout = layout
        if self._inputs is None:
            self._repeats += 1
            if self._repeats <= self._warmup:
                return recorder.run(lambda: self._step(*inputs))
            static_inputs = self._inputs = tuple(_rebuilt(part, [tensor.clone() for tensor in _tensors(part)]) for part in inputs)
            with _capturable(self._optimizer):
                self._loss = recorder.capture(lambda: self._step(*static_inputs))
        else:
            for buffer, new_input in zip(self._inputs, inputs, strict=True):
                for tensor, value in zip(_tensors(buffer), _tensors(new_input), strict=True):
                    tensor.copy_(value, non_blocking=True)
        recorder.replay()
        assert self._loss is not None
        return self._loss.clone()  # the next replay writes over it


class CudaRecorder:
    """A side stream, on which steps run before and while they are captured, and the graph captured last.

    Autograd ties gradients to the stream of their first step, so eager steps run where the captured one will.
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


def _tensors(part: Input) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    return [tensor for tensor in (part.values(), part.lengths(), part.offsets(), part.weights_or_none()) if tensor is not None]


def _layout(part: Input) -> Hashable:
    """Return what two inputs must have in common for one graph to serve both."""
    sizes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(part))
    return sizes if isinstance(part, Tensor) else (sizes, tuple(part.keys()), tuple(part.length_per_key()))


def _rebuilt(part: Input, tensors: Sequence[Tensor]) -> Input:
    """Return the same input over other tensors."""
    if isinstance(part, Tensor):
        return tensors[0]
    values, lengths, offsets, *weights = tensors
    return KeyedJaggedTensor(
        keys=part.keys(),
        values=values,
        lengths=lengths,
        offsets=offsets,
        weights=weights[0] if weights else None,
        stride=part.stride(),
        length_per_key=part.length_per_key(),
        offset_per_key=part.offset_per_key(),
    )


def _constant(rate: float | Tensor) -> Hashable:
    return id(rate) if isinstance(rate, Tensor) else rate


def _require_capturable(optimizer: Optimizer) -> None:
    if WORLD.several:
        raise ValueError("capture is on and several processes train together: set training.capture=false")
    for group in optimizer.param_groups:
        if "capturable" not in group or not (group["capturable"] or group.get("fused")):
            raise ValueError(
                f"capture is on and a step of {type(optimizer).__name__} can't be captured: build Adam or AdamW with fused=True, "
                "or set training.capture=false"
            )


@contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Set an optimizer's flag `capturable` during a capture; outside of one, the flag causes warnings and slows down steps."""
    flags = [group["capturable"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, flag in zip(optimizer.param_groups, flags, strict=True):
            group["capturable"] = flag
