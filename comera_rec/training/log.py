"""What a run tells: metrics.jsonl, TensorBoard events, and its progress on standard error."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from comera_rec.rank import RankScheduler
from data_pipeline.atomic import replacing

_SECONDS_BETWEEN_LINES = 10.0


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run.

    Args:
        folder: the run's folder.
        step: step from which the run resumes; lines after it are dropped.
        evaluated: whether the evaluations of that step are done; if not, their lines are dropped, too.
    """

    def __init__(self, folder: Path, step: int, *, evaluated: bool = True) -> None:
        path = folder / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if step and path.exists() else []
        kept = [line for line in lines if _is_before(line, step, evaluated)]
        with replacing(path) as beside:
            beside.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a")
        self._board: SummaryWriter | None = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        for entry in map(json.loads, kept):
            if entry["step"] == step:  # TensorBoard can't drop part of a step
                self._show(**entry)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line, and the numbers among its values to TensorBoard."""
        with self._named():
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        self._show(kind, step, **values)

    def _show(self, kind: str, step: int, **values: Any) -> None:
        group = f"{kind}/{values['split']}" if kind == "eval" else kind
        numbers = {f"{group}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        numbers |= {f"rank/{name}": sum(ranks) / max(1, len(ranks)) for name, ranks in values.get("ranks", {}).items()}

        def add(board: SummaryWriter) -> None:
            for name, value in numbers.items():
                board.add_scalar(name, value, step)

        self._let_board(add)

    def close(self) -> None:
        """Flush and close both."""
        with self._named():
            self._file.close()
        self._let_board(SummaryWriter.close)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors of writing say which file they are of."""
        try:
            yield
        except OSError as error:
            error.filename = self._file.name
            raise

    def _let_board(self, act: Callable[[SummaryWriter], None]) -> None:
        """Let TensorBoard's writer act; where it can't write, which is no reason to end a run, say so and drop it."""
        try:
            if self._board:
                act(self._board)
        except OSError as error:
            tell(f"cannot write TensorBoard events ({error.strerror or error}); the run goes on without them")
            self._board = None


class Progress(tqdm):
    """Shows how far a run is, by a bar on terminals and a line now and then elsewhere.

    Args:
        steps: steps taken before, of `total`.
    """

    def __init__(self, name: str, steps: int, total: int, *, shown: bool) -> None:
        if shown and steps:
            tell(f"{name}: resuming from step {steps:,} of {total:,}")
        super().__init__(total=total, initial=steps, unit="step", desc=name, disable=None if shown else True)
        self._name, self._prints_lines = name, shown and self.disable
        self._last_line = time.monotonic(), steps

    def observe(self, steps: int, loss: float) -> None:
        """Show the mean loss of the last steps."""
        self.set_postfix(loss=f"{loss:.4f}")
        (then, before), now = self._last_line, time.monotonic()
        if self._prints_lines and now - then >= _SECONDS_BETWEEN_LINES and steps > before:
            each = (now - then) / (steps - before)
            tell(f"{self._name}: step {steps:,} of {self.total:,}, loss {loss:.4f}, {each:.2g} s a step")
            self._last_line = now, steps


def tell(line: str) -> None:
    """Print a line on standard error, above a bar if there is one; nobody needs to read it (`2>&1 | head -1`)."""
    with suppress(OSError):
        tqdm.write(line, file=sys.stderr)


def _is_before(line: str, step: int, evaluated: bool) -> bool:
    try:
        entry = json.loads(line)
        return bool(entry["step"] < step or (entry["step"] == step and (evaluated or entry["kind"] != "eval")))
    except (ValueError, KeyError, TypeError):  # a line cut off by a crash, or damaged
        return False


def off_target(scheduler: RankScheduler) -> str | None:
    """Say why ranks have not reached their target size, and what would help; None if they have, or have no target."""
    if scheduler.stage != "done":
        steps = scheduler.config.early_steps + scheduler.config.late_steps
        return (
            f"the run ended in the {scheduler.stage} stage of its ranks, after {scheduler.steps:,} steps of their schedule, which "
            f"takes {steps:,}: raise training.steps and resume, or lower ranks.early_steps and ranks.late_steps"
        )
    size, unit = scheduler.history[-1]["bytes" if scheduler.in_bytes else "params"], "bytes" if scheduler.in_bytes else "parameters"
    if scheduler.target is None or size <= 1.01 * scheduler.target:
        return None
    return (
        f"TT modules ended with {size:,} {unit}, above their target of {scheduler.target:,}: start a new run with a larger "
        "ranks.w_size, ranks.threshold or ranks.late_steps, or with ranks.objective=budget"
    )
