"""Stopping between two steps: by SIGTERM or Ctrl-C, which all processes act on at the same step."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comera_rec.rank.tt_modules import max_over_processes, on_several_processes


class Interrupted(Exception):
    """Training was asked to stop (SIGTERM, SIGINT) and left a checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name} at step {step} with a checkpoint; run the same command to go on"
        )
        self.exit_status = 128 + signal_number


class StopSignals:
    """Notes SIGTERM and SIGINT while it is entered; the next SIGINT then ends the process at once, wherever it is.

    Where there are several processes, each calls the same of its methods at the same step.
    """

    def __init__(self) -> None:
        self._received = 0
        self._asked: tuple[dist.Work, Tensor] | None = None

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._asked is not None:
            with contextlib.suppress(RuntimeError):  # another process is gone
                self._asked[0].wait()
            self._asked = None

    def after_step(self) -> int:
        """The signal to stop for, or 0; one that any process has received is seen by all, at most a step later."""
        if not on_several_processes():
            return self._received
        before, signals = self._asked, torch.tensor([self._received])
        # The answer is waited for a step later, so that it costs no step its time.
        work = dist.all_reduce(signals, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._asked = work, signals
        if before is None:
            return 0
        before[0].wait()
        return int(before[1])

    def now(self) -> int:
        """The same, waiting for the other processes."""
        return int(max_over_processes(self._received))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
