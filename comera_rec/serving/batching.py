"""Joins requests that arrive together into one call of the model.

F categorical columns, R requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from comera_rec.serving.package import ServingModel
from data_pipeline.encoder import Flat


class _Waiting(NamedTuple):
    model: ServingModel
    rows: Flat
    scores: asyncio.Future[np.ndarray]


class Overloaded(Exception):
    """More rows wait than the queue holds."""


class Batcher:
    """A queue of requests that fills while the model runs, and for a short time before.

    The model runs in the event loop's thread. It holds Python's lock anyway, so another thread would add switches but no speed.

    Args:
        max_rows: largest number of rows in a call, unless a single request has more.
        max_wait: seconds that the first request of a call waits for others.
        max_queue: largest number of rows that wait, unless a single request has more.
        observe: called with the number of rows of every call.
    """

    def __init__(
        self, *, max_rows: int, max_wait: float, max_queue: int, observe: Callable[[int], object] = lambda rows: None
    ) -> None:
        self._max_rows, self._max_wait, self._max_queue, self._observe = max_rows, max_wait, max_queue, observe
        self._waiting: deque[_Waiting] = deque()
        self._waiting_rows = 0
        self._arrived = asyncio.Event()

    async def score(self, model: ServingModel, rows: Flat) -> np.ndarray:
        """Return the probabilities of a request's rows.

        Raises:
            Overloaded: too many rows wait already.
            ValueError: as raised by the model; other requests of the same call are not affected.
        """
        if self._waiting_rows and self._waiting_rows + len(rows.dense) > self._max_queue:
            raise Overloaded
        self._waiting_rows += len(rows.dense)
        scores: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(model, rows, scores))
        self._arrived.set()
        return await scores

    async def run(self) -> None:
        """Answer requests until canceled."""
        while True:
            await self._arrived.wait()
            if self._waiting_rows < self._max_rows:
                await asyncio.sleep(self._max_wait)
            _answer(self._take())
            if not self._waiting:
                self._arrived.clear()
            await asyncio.sleep(0)  # lets answers go out and requests come in

    def _take(self) -> list[_Waiting]:
        """Take the first requests, all for one model, that fit in a call."""
        taken = [self._waiting.popleft()]
        rows = len(taken[0].rows.dense)
        while self._waiting and self._waiting[0].model is taken[0].model:
            more = len(self._waiting[0].rows.dense)
            if rows + more > self._max_rows:
                break
            taken.append(self._waiting.popleft())
            rows += more
        self._waiting_rows -= rows
        self._observe(rows)
        return taken


def _answer(requests: Sequence[_Waiting]) -> None:
    try:
        with torch.inference_mode():
            scores: np.ndarray = requests[0].model(*map(torch.from_numpy, merge([request.rows for request in requests]))).numpy()
    except Exception as error:
        if len(requests) > 1:  # find the one at fault
            for request in requests:
                _answer([request])
        elif not requests[0].scores.done():
            requests[0].scores.set_exception(error)
        return
    ends = np.cumsum([len(request.rows.dense) for request in requests])
    for request, request_scores in zip(requests, np.split(scores, ends[:-1]), strict=True):
        if not request.scores.done():  # done if its client has left
            request.scores.set_result(request_scores)


def merge(requests: Sequence[Flat]) -> Flat:
    """Concatenate the rows of requests; values and lengths stay column by column."""
    if len(requests) == 1:
        return requests[0]
    dense = np.concatenate([request.dense for request in requests])
    lengths = [request.lengths.reshape(-1, len(request.dense)) for request in requests]
    columns = [np.split(request.values, np.cumsum(each.sum(1))[:-1]) for request, each in zip(requests, lengths, strict=True)]
    values = [request_columns[column] for column in range(len(lengths[0])) for request_columns in columns]
    return Flat(dense, np.concatenate(values), np.concatenate(lengths, axis=1).ravel())
