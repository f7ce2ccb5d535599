"""How well models with tables of equal bytes predict.

A small DLRM on synthetic Criteo logs of Kaggle's cardinalities, and a factorization model on implicit feedback (`data_sets.py`),
with large tables in every form of `embeddings.py` and `models.py`, at 10 to 500 times fewer bytes including index buffers. Batches,
steps, optimizer (Adam, all rates falling to zero over the second half of the steps), and the rest of the model are the same for
all. Every method tries every learning rate of its tables at every size with seed 0; the other seeds use the rate with the best NE
on the validation split. On implicit feedback, the state with the best validation NE is kept. Each run yields one row: NE on the
test split; validation NE, AUC, logloss and bytes are in `counted`.

    --only order=similarity                  ids are numbered by similarity (`data_pipeline.similarity`), not by frequency
    --only order=similarity,start=vectors    and tables start from the vectors that the order follows from
                                             (`comera_rec.training.start`); others are fitted to the same rows (`tables.fit_`)
    --only order=similarity,start=vectors,teacher=dense
                                             and models learn what a trained dense model predicts, for users with random items, too
    --only dtype=int8, dtype=bfloat16        tables are stored in this type, four or two numbers in a float32 number's bytes
                                             (`storage.py`)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast, get_args

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.harness.trainings import Trained, at_best_rate, train_all
from benchmarks.quality.data_sets import LOGS, ImplicitFeedback, Synth
from benchmarks.quality.embeddings import PER_TABLE
from benchmarks.quality.models import CONVERTED, RATES, START_RATES, Task, train
from benchmarks.quality.storage import BITS, DTYPES
from benchmarks.quality.storage import METHODS as STORED_METHODS
from benchmarks.quality.tables import STD, DoesNotFit
from data_pipeline.errors import UserError
from data_pipeline.manifest import Order

BUDGETS = (10, 50, 100, 200, 500)
METHODS = ("dense", "TT + rows", "TT + rows adaptive", "TT fixed", "TT adaptive", "TT SVD", *PER_TABLE)
"""Those that tables compare; `BITS` are compared only with dense tables."""
MORE_RATES = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, *RATES, 0.1, 0.3, 1.0)
"""While the best rate of a case is the smallest or largest one tried, its neighbor here is tried, too."""
STDS = {"video": 0.01}
"""Standard deviations of initial entries that suit the dense table better than `STD`, by its NE on the validation split."""
EVALUATIONS = 15
"""How often the validation split of implicit feedback is evaluated to keep the best state, because methods overfit."""
CHOICES = {"order": get_args(Order), "start": ("random", "vectors"), "teacher": ("none", "dense"), "dtype": tuple(DTYPES)}
"""What `--only` may choose, the default first."""

_feedback = lru_cache(4)(ImplicitFeedback.read)


def tasks(settings: Settings) -> list[Task]:
    """The tasks: synthetic logs always, implicit feedback if `--data` names it."""
    wanted, quick = settings.only.get("data"), settings.quick
    order, start, teacher = (_chosen(settings, name) for name in ("order", "start", "teacher"))
    if start == "vectors" and order == "frequency":
        raise UserError("tables start from vectors only with ids in order of similarity: add order=similarity to --only")
    selected, name = [], wanted or "synth"
    if name in LOGS:
        rows, scale, sizes = (20_000, 0.02, (8, 128, 20)) if quick else (1_000_000, 1.0, (16, 2048, 390))
        rates: tuple[float, ...] = RATES[:1] if quick else RATES[1:]  # the first rate was the worst for every method at 10x and 50x
        data = Synth(name, 10 * rows if name.endswith("10M") else rows, scale, cast(Order, order))
        selected.append(Task(data=data, dim=sizes[0], batch=sizes[1], steps=sizes[2], rates=rates))
    if settings.data and wanted not in LOGS:
        feedback = _feedback(settings.data, order)
        epoch = 2 * int(feedback.counts[0].sum()) // 2048
        steps = 20 if quick else min(2000, 3 * epoch)  # longer training overfits with every method
        rates = RATES[:1] if quick else RATES if start == "random" or teacher == "dense" else START_RATES
        std = STDS.get(feedback.name, STD)
        selected.append(Task(data=feedback, dim=32, batch=2048, steps=steps, rates=rates, std=std, evaluations=EVALUATIONS))
    return [replace(task, start=start, teacher=teacher) for task in selected if wanted in (None, task.data.name)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield one row for each run not in `settings.finished`: all sizes and rates of seed 0, then the other seeds."""
    dtype = _chosen(settings, "dtype")
    rows = [row for row in settings.finished if row.dtype == dtype]
    more_rates = () if settings.quick else MORE_RATES
    for task in tasks(settings):
        measured = partial(_measured, task, dtype, settings.data)
        yield from train_all("quality", _cases(task, settings), measured, settings, rows, dtype=dtype, more_rates=more_rates)


def _chosen(settings: Settings, name: str) -> str:
    """Return what `--only` chooses, by default the first choice."""
    value = settings.only.get(name, CHOICES[name][0])
    if value not in CHOICES[name]:
        raise UserError(f"{name} is {value}: choose one of {', '.join(CHOICES[name])}")
    return value


def _measured(task: Task, dtype: str, path: Path | None, shapes: dict[str, Any], seed: int) -> Trained | None:
    if path and isinstance(task.data, ImplicitFeedback) and "order" in shapes:
        task = replace(task, data=_feedback(path, shapes["order"], seed))  # orders are drawn anew, too
    try:
        counted = train(task, shapes["method"], shapes["compression"], shapes["lr"], seed, dtype)
    except DoesNotFit:
        return None
    return counted.pop("ne"), counted


def _cases(task: Task, settings: Settings) -> list[tuple[dict[str, Any], Sequence[float]]]:
    """All sizes and methods, with the rates to try first."""
    methods = STORED_METHODS if _chosen(settings, "dtype") != "float32" else METHODS
    if "method" in settings.only:
        methods = (*methods, *BITS)
    budgets = BUDGETS[:1] if settings.quick else BUDGETS
    cases = [(method, size) for size in budgets for method in methods if method not in ("dense", *BITS) or size == BUDGETS[0]]
    if settings.only.get("method") in CONVERTED:
        cases = [(settings.only["method"], size) for size in (4, 10)]
    sizes: dict[str, Any] = {"steps": task.steps, "dim": task.dim, "batch": task.batch}
    for name in ("order", "start", "teacher"):  # rows have them where they are unusual
        if _chosen(settings, name) != CHOICES[name][0]:
            sizes[name] = _chosen(settings, name)
    return [({"data": task.data.name, "method": method, "compression": size, **sizes}, task.rates) for method, size in cases]


def chosen(
    rows: Sequence[Row], dtype: str = "float32", order: str = "frequency", start: str = "random", teacher: str = "none"
) -> list[Row]:
    """The runs of this table type, order, start and teacher, at the rate that each method chose for each size."""
    wanted = {"order": order, "start": start, "teacher": teacher}
    return at_best_rate(
        [
            row
            for row in rows
            if row.dtype == dtype and all(row.shapes.get(name, CHOICES[name][0]) == value for name, value in wanted.items())
        ]
    )
