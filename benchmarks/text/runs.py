"""Training runs from scratch, all tuned in the same way, one row per run.

Every method tries each of its learning rates with the first seed; the other seeds use the rate with the lowest training loss, the
mean over the last tenth of the steps. `counted` has that loss, parameters, wall-clock and CPU seconds of all steps (including new
projections and merges), and the peak of resident memory beyond what the process had before the model was built.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import mean
from typing import Any

from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings
from benchmarks.harness.memory import memory_is_measurable, resident_peak
from benchmarks.harness.rows import Row

SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Method:
    """A form of the model and the learning rates to choose from.

    Attributes:
        name: the provider's name in rows.
        rates: learning rates.
    """

    name: str
    rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train on and how to score it.

    Attributes:
        op: name of the benchmark.
        unit: unit of the score.
        sizes: sizes of the model and its batches, for rows.
        methods: the forms to compare.
        steps: number of steps of every run.
        train: (method's name, learning rate, steps, seed) -> the score and counted quantities.
    """

    op: str
    unit: str
    sizes: dict[str, Any]
    methods: Sequence[Method]
    steps: int
    train: Callable[[str, float, int, int], tuple[float, dict[str, float]]]


def run_task(task: Task, settings: Settings, *, seeds: int = SEEDS) -> Iterator[list[Row]]:
    """Yield the runs not in `settings.finished`: all rates with the first seed, then the best rates with all seeds."""
    environment = describe(settings.device)
    rows = list(settings.finished)
    methods = [method for method in task.methods if _is_selected(method, settings)]
    first = settings.seed
    plan: list[tuple[Method, float | None, int]] = [(method, rate, first) for method in methods for rate in method.rates]
    plan += [(method, None, first + more) for more in range(1, 1 if settings.quick else seeds) for method in methods]
    for method, rate, seed in tqdm(plan, desc=task.op, unit="run", disable=None):
        shapes = {"method": method.name, **task.sizes, "steps": task.steps}
        lr = best_rate(rows, shapes) if rate is None else rate
        shapes["lr"] = lr
        if lr is None or any(row.shapes == shapes and row.seed == seed for row in rows):
            continue
        row = _row(task, method.name, shapes, seed, environment, settings.memory)
        rows.append(row)
        yield [row]


def _row(task: Task, method: str, shapes: dict[str, Any], seed: int, environment: dict[str, Any], memory: bool) -> Row:
    outcome: list[tuple[float, dict[str, float]]] = []

    def call(_: int) -> None:
        outcome.append(task.train(method, shapes["lr"], shapes["steps"], seed))

    if memory and memory_is_measurable(environment["device"]):
        peak = {"peak_mib": resident_peak(call, 0)}
    else:
        call(0)
        peak = {}
    score, counted = outcome[0]
    return Row(
        op=task.op, provider=method, shapes=shapes, dtype="float32", pass_="test", p20=score, p50=score, p80=score, unit=task.unit,
        samples=1, ratios={}, counted={**counted, **peak}, **environment, seed=seed,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def _is_selected(method: Method, settings: Settings) -> bool:
    return any(fnmatchcase(method.name, pattern) for pattern in settings.only.get("method", "*").split("|"))


def best_rate(rows: Sequence[Row], shapes: dict[str, Any]) -> float | None:
    """The rate with the lowest training loss among rows of these sizes; None if there are none."""
    tuned = [row for row in rows if {**row.shapes, "lr": None} == {**shapes, "lr": None}]
    return min(tuned, key=lambda row: row.counted["train_loss"]).shapes["lr"] if tuned else None


def chosen(rows: Sequence[Row], method: str) -> list[Row]:
    """A method's runs at its chosen rate."""
    method_rows = [row for row in rows if row.provider == method]
    return [row for row in method_rows if row.shapes["lr"] == best_rate(method_rows, row.shapes)]


def steps_in_equal_time(rows: Sequence[Row], steps: int, method: str, reference: str) -> int:
    """How many steps of a method take as many CPU seconds as `steps` steps of the reference, both at their chosen rates."""
    runs = [row for row in rows if row.shapes["steps"] == steps]
    seconds, reference_seconds = (mean(row.counted["cpu_seconds"] for row in chosen(runs, name)) for name in (method, reference))
    return max(1, int(steps * reference_seconds / seconds))


def counted(metrics: dict[str, Any]) -> dict[str, float]:
    """Select the metrics of an example's run that rows keep."""
    return {
        **{name: metrics[name] for name in ("train_loss", "params", "dense_params", "seconds", "cpu_seconds")},
        "step_ms": metrics["step_ms"]["p50"],
    }


def format_case(rows: Sequence[Row]) -> str:
    """Format a run as one line."""
    return "\n".join(
        f"{row.op} {row.provider} lr {row.shapes['lr']} {row.shapes['steps']} steps seed {row.seed}: {row.unit} {row.p50:.4f}, "
        f"training loss {row.counted['train_loss']:.4f}, {row.counted['params']:,.0f} params, {row.counted['cpu_seconds']:.0f} s"
        for row in rows
    )
