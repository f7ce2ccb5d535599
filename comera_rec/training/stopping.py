"""Stopping between two steps: by SIGTERM, SIGHUP or Ctrl-C, which all processes act on at the same step."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from comera_rec.distributed import WORLD


class Interrupted(Exception):
    """Training was asked to stop (SIGTERM, SIGHUP, SIGINT) and left a checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name} at step {step} with a checkpoint; run the same command to resume"
        )
        self.exit_status = 128 + signal_number


class StopSignals:
    """Context manager that records SIGTERM, SIGHUP unless it is ignored (`nohup`), and SIGINT.

    A SIGINT after any of them ends the process at once, wherever it is.

    With several processes, each calls the same methods at the same step.

    Attributes:
        received: the first signal that this process has received, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._pending: Callable[[], Tensor] | None = None

    def __enter__(self) -> "StopSignals":
        hang_up = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else set()
        numbers = {signal.SIGTERM, signal.SIGINT} | hang_up
        self._handlers: dict[int, Any] = {number: signal.signal(number, self._record) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._pending is not None:
            with contextlib.suppress(RuntimeError):  # another process is gone
                self._pending()

    def after_step(self) -> int:
        """Return the signal that any process is to stop for, or 0; all see it at the same step.

        With several processes, it is that of the step before, so that no step waits for the other processes.
        """
        if not WORLD.several:
            return self.received
        previous, self._pending = self._pending, WORLD.start_max(torch.tensor(self.received))
        return int(previous()) if previous is not None else 0

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
