"""Joins requests that arrive together into one call of the model."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from comera_rec.serving.package import ModelMetadata, TensorInput
from comera_rec.serving.versions import Version

Outputs = tuple[list[np.ndarray], str]  # and the number of the version that they are of


class _Waiting(NamedTuple):
    version: Version
    tensors: Sequence[np.ndarray]
    rows: int
    outputs: asyncio.Future[Outputs]


class Overloaded(Exception):
    """More rows wait than the queue holds."""


class Batcher:
    """A queue of requests that fills while the model runs, and while the event loop reads what has arrived.

    The model runs in the event loop's thread. It holds Python's lock anyway, so another thread would add switches but no speed.

    Args:
        max_rows: largest number of rows in a call, unless a single request has more.
        max_queue: largest number of rows that wait, unless a single request has more.
        observe: called with the number of rows of every call.
    """

    def __init__(self, *, max_rows: int, max_queue: int, observe: Callable[[int], object] = lambda rows: None) -> None:
        self._max_rows, self._max_queue, self._observe = max_rows, max_queue, observe
        self._waiting: deque[_Waiting] = deque()
        self.waiting_rows = 0

    def add(self, version: Version, tensors: Sequence[np.ndarray], rows: int) -> asyncio.Future[Outputs]:
        """Queue a request; return its outputs to come, or what the model raises for it.

        Raises:
            Overloaded: too many rows wait already.
        """
        if self.waiting_rows and self.waiting_rows + rows > self._max_queue:
            raise Overloaded
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._run)
        self.waiting_rows += rows
        self._waiting.append(_Waiting(version, tensors, rows, loop.create_future()))
        return self._waiting[-1].outputs

    def _run(self) -> None:
        """Answer the first requests, all for one version, that fit in a call."""
        taken = [self._waiting.popleft()]
        version, rows = taken[0].version, taken[0].rows
        while self._waiting and self._waiting[0].version is version and version.model.metadata.is_by_row:
            if rows + self._waiting[0].rows > self._max_rows:
                break
            taken.append(self._waiting.popleft())
            rows += taken[-1].rows
        self.waiting_rows -= rows
        self._observe(rows)
        _answer(taken)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run)


def _answer(requests: Sequence[_Waiting]) -> None:
    requests = [request for request in requests if not request.outputs.cancelled()]
    if not requests:
        return
    version = requests[0].version
    try:
        merged = merge([request.tensors for request in requests], version.model.metadata)
        with torch.inference_mode():
            outputs = [output.numpy() for output in version.model.run(*map(torch.from_numpy, merged))]
        if len(requests) > 1 and any(len(output) != sum(request.rows for request in requests) for output in outputs):
            raise ValueError("outputs have another number of rows")
    except Exception as error:
        if len(requests) == 1:
            requests[0].outputs.set_exception(error)
            return
        half = len(requests) // 2  # to find the one at fault
        _answer(requests[:half])
        _answer(requests[half:])
        return
    begin = 0
    for request in requests:
        alone = len(requests) == 1  # outputs may then have another number of rows
        part = outputs if alone else [output[begin : begin + request.rows] for output in outputs]
        request.outputs.set_result((part, version.number))
        begin += request.rows


def merge(requests: Sequence[Sequence[np.ndarray]], metadata: ModelMetadata) -> Sequence[np.ndarray]:
    """Concatenate the rows of requests; the tensors of a KeyedJaggedTensor stay key by key."""
    if len(requests) == 1:
        return requests[0]
    merged: list[np.ndarray] = []
    for each, given in metadata.by_input(zip(*requests, strict=True)):
        if isinstance(each, TensorInput):
            merged.append(np.concatenate(given[0]))
            continue
        values, all_lengths, *weights = given
        lengths = [request_lengths.reshape(len(each.keys), -1) for request_lengths in all_lengths]
        keys = np.tile(np.arange(len(each.keys)), len(requests)).repeat(np.concatenate([part.sum(1) for part in lengths]))
        order = keys.argsort(kind="stable")
        merged += [np.concatenate(values)[order], np.concatenate(lengths, axis=1).ravel()]
        merged += [np.concatenate(part)[order] for part in weights]
    return merged
