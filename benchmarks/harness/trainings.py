"""Whole trainings, one row for each: all learning rates of a case with the first seed, the best rate with the others.

A case is the sizes of its rows but "lr". "method", one of them, is the rows' provider.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from tqdm import tqdm

from benchmarks.harness.measure import Settings, case_rows
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Given
from data_pipeline.errors import UserError

SEEDS = 3

Shapes = Mapping[str, Any]
Trained = tuple[float, dict[str, float]]


def train_all(
    op: str,
    cases: Sequence[tuple[Shapes, Sequence[float]]],
    train: Callable[[dict[str, Any], int], Trained | None],
    settings: Settings,
    rows: list[Row],
    *,
    dtype: str = "float32",
    more_rates: Sequence[float] = (),
) -> Iterator[list[Row]]:
    """Yield the rows of all trainings that are not finished.

    Args:
        op: the benchmark's name.
        cases: sizes and learning rates. `settings.only` may select by patterns of a size, separated by `|`.
        train: (sizes with "lr", seed) -> NE on the test split and counted quantities, or None if the case is impossible. Rates are
            chosen by the smallest "val_ne", which is counted.
        settings: from the command line; if quick, there is only one seed.
        rows: those of finished trainings; new ones are appended.
        dtype: type of the weights.
        more_rates: ascending; while a case's best rate is the lowest or highest one tried, its neighbor here is tried too.
    """
    known = {"order", "start", "teacher", "dtype", *(name for sizes, _ in cases for name in sizes)}
    if unknown := settings.only.keys() - known:
        raise UserError(f"--only names {min(unknown)!r}, which is no size: choose from {', '.join(sorted(known))}")
    cases = [case for case in cases if _is_selected(case[0], settings.only)]
    plan = [(*case, seed) for seed in range(1 if settings.quick else SEEDS) for case in cases]
    for sizes, rates, more in tqdm(plan, desc=op, unit="case", disable=None):
        seed = settings.seed + more
        for lr in filter(None, [best_rate(rows, sizes)]) if more else _rates(rows, sizes, rates, more_rates):
            shapes = {**sizes, "lr": lr}
            if any(row.seed == seed and row.shapes == shapes for row in rows):
                continue
            trained = train(shapes, seed)
            if trained is None:
                break
            ne, counted = trained
            method, case = sizes["method"], Given(values=shapes, dtype=dtype)
            seeded = replace(settings, seed=seed)
            row = case_rows(op, case, seeded, "test", "NE", {method: [ne]}, {method: counted})
            rows += row
            yield row


def _is_selected(sizes: Shapes, only: Mapping[str, str]) -> bool:
    return all(
        any(fnmatchcase(str(sizes[name]), pattern) for pattern in patterns.split("|"))
        for name, patterns in only.items()
        if name in sizes
    )


def _rates(rows: Sequence[Row], sizes: Shapes, rates: Sequence[float], more_rates: Sequence[float]) -> Iterator[float]:
    """Yield rates, then further ones, until the best of those in `rows` has worse ones on both sides."""
    yield from rates
    while (best := best_rate(rows, sizes)) is not None:
        tried = [row.shapes["lr"] for row in first_runs(rows, sizes)]
        lower, higher = [rate for rate in more_rates if rate < best][-1:], [rate for rate in more_rates if rate > best][:1]
        further = lower if best == min(tried) else higher if best == max(tried) else []
        if not further:
            return
        yield from further


def first_runs(rows: Sequence[Row], sizes: Shapes) -> list[Row]:
    """The runs of a case's first seed, which tried all rates."""
    rows = [row for row in rows if _case(row.shapes) == _case(sizes)]
    first = min((row.seed for row in rows), default=0)
    return [row for row in rows if row.seed == first]


def best_rate(rows: Sequence[Row], sizes: Shapes) -> float | None:
    """The rate that the first seed's runs of a case choose; None if there are none."""
    runs = first_runs(rows, sizes)
    return min(runs, key=lambda row: row.counted["val_ne"]).shapes["lr"] if runs else None


def at_best_rate(rows: Sequence[Row]) -> list[Row]:
    """The runs at the rate that their case chose."""
    by_case: dict[frozenset, list[Row]] = {}
    for row in rows:
        by_case.setdefault(_case(row.shapes), []).append(row)
    best = {case: best_rate(runs, runs[0].shapes) for case, runs in by_case.items()}
    return [row for row in rows if row.shapes["lr"] == best[_case(row.shapes)]]


def _case(sizes: Shapes) -> frozenset:
    return frozenset((name, value) for name, value in sizes.items() if name != "lr")
