"""How well models with tables of equal bytes predict.

A small DLRM on synthetic Criteo logs of Kaggle's cardinalities, and a factorization model on implicit feedback (`data_sets.py`),
with large tables in every form of `embeddings.py` and `models.py`, at 10 to 500 times fewer bytes including index buffers. Batches,
steps, optimizer (Adam, all rates falling to zero over the second half of the steps), and the rest of the model are the same for
all. Every method tries every learning rate of its tables at every size with seed 0; the other seeds use the rate with the best NE
on the validation split. On data sets that every method overfits (`Task.evaluations`), the state with the best validation NE is
kept. Each run yields one row: NE on the test split; validation NE, AUC, logloss and bytes are in `counted`. `--only dtype=int8` or
`dtype=bfloat16` stores tables in that type, with four or two numbers in the bytes of a float32 one (`storage.py`).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.quality.data_sets import DECAYS, ImplicitFeedback, Synth
from benchmarks.quality.embeddings import PER_TABLE, SPLITS
from benchmarks.quality.models import RATES, SCORES, Task, train
from benchmarks.quality.storage import DTYPES
from benchmarks.quality.storage import METHODS as STORED_METHODS
from benchmarks.quality.tables import STD, DoesNotFit

BUDGETS = (10, 50, 100, 200, 500)
TT_METHODS = ("TT + rows", "TT + rows adaptive", "TT fixed", "TT adaptive", "TT SVD")
METHODS = ("dense", *TT_METHODS, *PER_TABLE, "pruning", "PEP")
SEEDS = 3
MORE_RATES = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, *RATES, 0.1, 0.3, 1.0)
"""While the best rate of a case is the smallest or largest one tried, its neighbor here is tried, too."""
STDS = {"video": 0.001}
"""Standard deviations of initial entries that suit the dense table better than `STD`, by its NE on the validation split."""
EVALUATIONS = {"video": 15}
"""Data sets that every method overfits -> how often the validation split is evaluated to keep the best state."""
EARLY_RATES = (0.0003, 0.001, *RATES)
"""Rates tried first on these: low and high ones may each be better than those between them."""
TWICE = (20, ("TT fixed", "TT SVD"))
"""At this size these methods also train for twice the steps, so that TT SVD's dense half is as long as the other runs."""

VARIANTS = {*SCORES, *SPLITS} - {*METHODS}
"""Variants of one method, compared only with each other; figures and tables of all methods omit them."""
AT_RATE_OF_METHOD = VARIANTS - {*SPLITS}
"""Variants that run at the best rate of the method that they vary."""
VARIED = {*DECAYS} - {"synth"}
"""Variants of the logs, at one size only, which have a table of their own."""


def tasks(settings: Settings) -> list[Task]:
    """The tasks: synthetic logs always, implicit feedback if `--data` names it."""
    selected, wanted = [], settings.only.get("data")
    if wanted is None or wanted in DECAYS:
        name = wanted or "synth"
        if settings.quick:
            selected = [Task(data=Synth(name, 20_000, 0.02), dim=8, batch=128, steps=20, rates=RATES[:1])]
        else:
            # The first rate was the worst for every method at 10x and 50x.
            selected = [Task(data=Synth(name, 1_000_000, 1.0), dim=16, batch=2048, steps=390, rates=RATES[1:])]
    if settings.data and wanted not in DECAYS:
        feedback = ImplicitFeedback.read(settings.data)
        epoch = 2 * int(feedback.counts[0].sum()) // 2048
        rates = EARLY_RATES if feedback.name in EVALUATIONS else RATES
        selected.append(
            Task(
                data=feedback,
                dim=32,
                batch=2048,
                steps=20 if settings.quick else min(2000, 3 * epoch),  # longer training overfits with every method
                rates=rates[:1] if settings.quick else rates,
                std=STDS.get(feedback.name, STD),
                evaluations=EVALUATIONS.get(feedback.name, 0),
            )
        )
    return [task for task in selected if wanted in (None, task.data.name)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield one row for each run not in `settings.finished`: all sizes and rates of seed 0, then the other seeds."""
    environment = describe(settings.device)
    dtype = settings.only.get("dtype", "float32")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}: choose one of {', '.join(DTYPES)}")
    rows = [row for row in settings.finished if row.dtype == dtype]
    done = {_key(row) for row in rows}
    for task in tasks(settings):
        for (method, compression, steps), seed in tqdm(_plan(task, settings), desc=task.data.name, unit="case", disable=None):
            case = {"data": task.data.name, "method": method, "compression": compression, "steps": steps}
            is_tuned = seed == settings.seed and method not in AT_RATE_OF_METHOD
            for lr in _rates(task, rows, case) if is_tuned else filter(None, [best_rate(rows, case)]):
                shapes = {**case, "lr": lr, "dim": task.dim, "batch": task.batch}
                if (tuple(shapes.values()), seed) in done:
                    continue
                try:
                    measured = train(task, method, compression, lr, seed, steps, dtype)
                except DoesNotFit:
                    break
                ne = measured.pop("ne")
                row = Row(
                    op="quality", provider=method, shapes=shapes, dtype=dtype,
                    pass_="test", p20=ne, p50=ne, p80=ne, unit="NE", samples=1, ratios={}, counted=measured, **environment,
                    seed=seed, date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                )  # fmt: skip
                rows.append(row)
                yield [row]


def _rates(task: Task, rows: Sequence[Row], case: dict[str, Any]) -> Iterator[float]:
    """Yield the task's rates, then further ones, until the best of those in `rows` has worse ones on both sides."""
    yield from task.rates
    while len(task.rates) > 1:
        tried = [row.shapes["lr"] for row in _select(rows, case)]
        if (best := best_rate(rows, case)) is None:
            return
        if best == min(tried):
            further = [rate for rate in MORE_RATES if rate < best][-1:]
        elif best == max(tried):
            further = [rate for rate in MORE_RATES if rate > best][:1]
        else:
            return
        if not further:
            return
        yield from further


def _plan(task: Task, settings: Settings) -> list[tuple[tuple[str, float, int], int]]:
    """List ((method, compression, steps), seed): all cases of the first seed, then those of the others."""
    cases = [(method, compression, task.steps) for compression in BUDGETS for method in METHODS]
    cases = [case for case in cases if case[0] != "dense" or case[1] == BUDGETS[0]]
    if settings.only.get("dtype", "float32") != "float32":
        cases = [case for case in cases if case[0] in STORED_METHODS]
    cases += [(method, TWICE[0], 2 * task.steps) for method in TWICE[1]]
    cases += [(method, 50, task.steps) for method in SCORES if method in VARIANTS]
    if "method" in settings.only:  # too many to run by default
        cases += [(method, compression, task.steps) for compression in BUDGETS for method in SPLITS]
    cases = [case for case in cases if _is_selected(case, settings.only)]
    if settings.quick:
        cases = [case for case in cases if case[1:] == (BUDGETS[0], task.steps)]
    return [(case, seed) for seed in range(settings.seed, settings.seed + (1 if settings.quick else SEEDS)) for case in cases]


def _is_selected(case: tuple[str, float, int], only: Mapping[str, str]) -> bool:
    """Whether `only` selects a case: names are separated by `|`, and `*` matches any text."""
    named = zip(("method", "compression"), case, strict=False)
    return all(any(fnmatchcase(str(value), pattern) for pattern in only.get(name, "*").split("|")) for name, value in named)


def best_rate(rows: Sequence[Row], shapes: dict[str, Any]) -> float | None:
    """The rate with the smallest validation NE at this size; some variants take that of the method they vary."""
    varied = "TT adaptive" if shapes["method"] in AT_RATE_OF_METHOD else shapes["method"]
    tuned = _select(rows, shapes) or _select(rows, {**shapes, "method": varied})
    return min(tuned, key=lambda row: row.counted["val_ne"]).shapes["lr"] if tuned else None


def _select(rows: Sequence[Row], shapes: dict[str, Any]) -> list[Row]:
    """The rows of a case's first seed, which tried all rates."""
    rows = [row for row in rows if all(row.shapes[name] == value for name, value in shapes.items())]
    return [row for row in rows if row.seed == min(row.seed for row in rows)]


def _key(row: Row) -> tuple[tuple[Any, ...], int]:
    return tuple(row.shapes.values()), row.seed


def chosen(rows: Sequence[Row], dtype: str = "float32") -> list[Row]:
    """The runs of usual length and this table type, at the rate that each method chose for each size."""
    rows = [row for row in rows if row.dtype == dtype]
    usual = {
        data: min(row.shapes["steps"] for row in rows if row.shapes["data"] == data) for data in {r.shapes["data"] for r in rows}
    }
    rows = [row for row in rows if row.shapes["steps"] == usual[row.shapes["data"]]]

    names = ("data", "method", "compression", "steps")
    cases = {tuple(row.shapes[name] for name in names) for row in rows}
    best = {case: best_rate(rows, dict(zip(names, case, strict=True))) for case in cases}
    return [row for row in rows if row.shapes["lr"] == best[tuple(row.shapes[name] for name in names)]]


def format_case(rows: Sequence[Row]) -> str:
    """Format a run as one line."""
    return "\n".join(
        f"{row.shapes['data']} {row.provider} {row.shapes['compression']}x {row.dtype} lr {row.shapes['lr']} seed {row.seed}: "
        f"NE {row.p50:.4f}, AUC {row.counted['auc']:.4f}, {row.counted['bytes']:,.0f} bytes, {row.counted['step_ms']:.1f} ms/step"
        for row in rows
    )
