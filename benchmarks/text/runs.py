"""What the benchmarks of text count of a training, and how many steps fit into another model's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from benchmarks.harness.measure import Settings
from benchmarks.harness.memory import memory_is_measurable, resident_peak
from benchmarks.harness.rows import Row, select
from benchmarks.harness.trainings import at_best_rate


def counted(train: Callable[[], dict[str, Any]], settings: Settings, *scores: str) -> dict[str, float]:
    """Run an example's training; return scores, size, wall-clock and CPU seconds, and the MiB that it added to the peak."""
    outcome: list[dict[str, Any]] = []
    peak = {}
    if settings.memory and memory_is_measurable(settings.device):
        peak["peak_mib"] = resident_peak(lambda _: outcome.append(train()), 0)
    else:
        outcome.append(train())
    (metrics,) = outcome
    names = (*scores, "train_loss", "params", "dense_params", "seconds", "cpu_seconds")
    return {name: metrics[name] for name in names} | {"step_ms": metrics["step_ms"]["p50"]} | peak


def steps_in_equal_time(rows: Sequence[Row], steps: int, method: str, reference: str) -> int:
    """How many steps of a method take as many CPU seconds as `steps` steps of the reference, both at their chosen rates."""
    runs = at_best_rate(select(rows, steps=steps))
    seconds, limit = (mean(row.counted["cpu_seconds"] for row in select(runs, provider=name)) for name in (method, reference))
    return max(1, int(steps * limit / seconds))
