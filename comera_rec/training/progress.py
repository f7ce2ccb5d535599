"""Progress of a run on standard error: a bar on terminals, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows how far a run is, of which `steps` of `total` steps were taken before; a context manager."""

    def __init__(self, name: str, steps: int, total: int, *, shown: bool) -> None:
        self._name, self._total = name, total
        if shown and steps:
            tell(f"{name}: resuming from step {steps:,} of {total:,}")
        self._bar = tqdm(total=total, initial=steps, unit="step", desc=name, disable=None if shown else True)
        self._prints_lines = shown and self._bar.disable
        self._last_line = time.monotonic(), steps

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def step(self) -> None:
        """Count a step."""
        self._bar.update()

    def observe(self, steps: int, loss: float) -> None:
        """Show the mean loss of the last steps."""
        self._bar.set_postfix(loss=f"{loss:.4f}")
        (then, before), now = self._last_line, time.monotonic()
        if self._prints_lines and now - then >= _SECONDS_BETWEEN_LINES and steps > before:
            each = (now - then) / (steps - before)
            tell(f"{self._name}: step {steps:,} of {self._total:,}, loss {loss:.4f}, {each:.2g} s a step")
            self._last_line = now, steps


def tell(line: str) -> None:
    """Print a line on standard error, above a bar if there is one."""
    tqdm.write(line, file=sys.stderr)
