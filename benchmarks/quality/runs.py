"""How well models with tables of equal bytes predict.

A small DLRM on synthetic Criteo logs of Kaggle's cardinalities, and a factorization model on implicit feedback (`data_sets.py`),
with large tables in every form of `embeddings.py`, at 10 to 500 times fewer bytes including index buffers. Batches, steps,
optimizer (Adam, all rates falling to zero over the second half of the steps), and the rest of the model are the same for all. Every
method tries every learning rate of its tables at every size with seed 0; the other seeds use the rate with the best NE on the
validation split. On data sets that every method overfits (`Task.evaluations`), the state with the best validation NE is kept. Each
run yields one row: NE on the test split; validation NE, AUC, logloss and bytes are in `counted`. `--only dtype=int8` or
`dtype=bfloat16` stores tables in that type, with four or two numbers in the bytes of a float32 one (`storage.py`).

    TT adaptive     starts at twice the budget and shrinks to it between 10 % and 50 % of the steps, by Taylor scores of ranks
    TT + rows adaptive
                    starts at one and a half times the budget and shrinks likewise, in ranks and in columns of hot rows
    TT SVD          trains dense for half of the steps, then applies TT-SVD within the budget, with ranks spread over tables and
                    errors weighted by how often rows are read, then trains on
"""

from __future__ import annotations

import copy
import datetime
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.quality.codes import Clustered
from benchmarks.quality.data_sets import DECAYS, DataSet, ImplicitFeedback, Rows, Synth
from benchmarks.quality.embeddings import MIN_ROWS, PER_TABLE, SPLITS, TT, Embeddings, split_tables, tt_tables
from benchmarks.quality.pruning import Pruning, ThresholdSearch
from benchmarks.quality.storage import DTYPES, round_, round_stochastically_, stored_bytes
from benchmarks.quality.storage import METHODS as STORED_METHODS
from benchmarks.quality.tables import STD, DoesNotFit
from comera_rec import RankConfig, RankScheduler, fit_tables_, rank_param_groups
from comera_rec.training.metrics import BinaryMetrics

BUDGETS = (10, 50, 100, 200, 500)
TT_METHODS = ("TT + rows", "TT + rows adaptive", "TT fixed", "TT adaptive", "TT SVD")
METHODS = ("dense", *TT_METHODS, *PER_TABLE, "pruning", "PEP")
SEEDS = 3
RATES = (0.003, 0.01, 0.03)
MORE_RATES = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, *RATES, 0.1, 0.3, 1.0)
"""While the best rate of a case is the smallest or largest one tried, its neighbor here is tried, too."""
STDS = {"video": 0.001}
"""Standard deviations of initial entries that suit the dense table better than `STD`, by its NE on the validation split."""
EVALUATIONS = {"video": 15}
"""Data sets that every method overfits -> how often the validation split is evaluated to keep the best state."""
LR_HEAD = 0.002
DECAY = 0.5  # of the steps
TWICE = (20, ("TT fixed", "TT SVD"))
"""At this size these methods also train for twice the steps, so that TT SVD's dense half is as long as the other runs."""
SCORES = {
    "TT adaptive": "taylor",
    "TT adaptive norm": "norm",
    "TT adaptive magnitude": "magnitude",
    "TT + rows adaptive": "taylor",
}
SHRINKING = {*SCORES, "TT SVD", "CCE", "pruning"}
"""These have their final form after half of the steps."""

VARIANTS = {*SCORES, *SPLITS} - {*METHODS}
"""Variants of one method, compared only with each other; figures and tables of all methods omit them."""
VARIED = {*DECAYS} - {"synth"}
"""Variants of the logs, at one size only, which have a table of their own."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, how long to train on it, the learning rates to try first, and the standard deviation of initial entries.

    With `evaluations` > 0 the validation split is evaluated so often during training, and the best state is kept: early stopping.
    """

    data: DataSet
    dim: int
    batch: int
    steps: int
    rates: tuple[float, ...] = RATES
    std: float = STD
    evaluations: int = 0


class Head(nn.Module):
    """Maps rows [B, F, N] and integers [B, I] to logits [B]: DLRM's interaction and MLPs.

    Without integers it is a weighted inner product and a linear part, as in a factorization machine.
    """

    def __init__(self, fields: int, dim: int, integers: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(integers, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU()) if integers else None
        width = dim + (fields + 1) * fields // 2 if integers else (fields + 1) * dim
        self.top = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1)) if integers else nn.Linear(width, 1)

    def forward(self, rows_BFN: Tensor, dense_BI: Tensor) -> Tensor:  # noqa: N803  shapes
        if self.bottom is None:
            logits: Tensor = self.top(torch.cat([rows_BFN.prod(dim=1) * rows_BFN.shape[2], rows_BFN.flatten(1)], dim=1))
            return logits.squeeze(1)
        dense_BN = self.bottom(dense_BI)
        all_BFN = torch.cat([dense_BN[:, None], rows_BFN], dim=1)
        left, right = torch.tril_indices(all_BFN.shape[1], all_BFN.shape[1], offset=-1)
        dots = (all_BFN @ all_BFN.mT)[:, left, right]
        logits = self.top(torch.cat([dense_BN, dots], dim=1))
        return logits.squeeze(1)


class Model(nn.Module):
    """Tables and head."""

    def __init__(self, task: Task, method: str, compression: float) -> None:
        super().__init__()
        counts = task.data.counts
        kind, configs = method, None
        if method.startswith("TT"):
            kind = "dense" if method == "TT SVD" else method
            sizes = [len(count) for count in counts if len(count) >= MIN_ROWS]
            hot_rows: Literal["auto", 0] = "auto" if "rows" in method else 0
            configs = tt_tables(sizes, task.dim, compression, hot_rows)
            if method in SPLITS:
                configs = split_tables(sizes, task.dim, compression, *SPLITS[method])
            elif method in SCORES:  # the modes chosen for the budget, at a larger size
                start = 1.5 if hot_rows else 2
                configs = tt_tables(sizes, task.dim, compression / start, hot_rows, configs[0].tt_shape().order)
        self.embeddings = Embeddings(counts, task.dim, kind, compression, configs, task.std)
        self.head = Head(len(counts), task.dim, task.data.test.dense.shape[1])

    def forward(self, rows: Rows) -> Tensor:
        logits: Tensor = self.head(self.embeddings(rows.ids), rows.dense)
        return logits


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam with rate `lr` for tables, a tenth of it for rank parameters, and `LR_HEAD` for the head."""
    assert isinstance(model, Model)
    groups = [g for g in rank_param_groups(model, lr_cores=lr, lr_ranks=lr / 10, lr_dense=LR_HEAD) if g["name"] != "dense"]
    special = {id(p) for group in groups for p in group["params"]}
    tables = [p for p in model.embeddings.parameters() if id(p) not in special]
    groups += [{"params": tables, "lr": lr}] if tables else []
    groups += [{"params": list(model.head.parameters()), "lr": LR_HEAD}]
    return torch.optim.Adam([{**group, "initial_lr": group["lr"]} for group in groups], fused=True)


def train(
    task: Task, method: str, compression: float, lr: float, seed: int, steps: int, dtype: str = "float32"
) -> dict[str, float]:
    """Train one model; return val_ne; ne, auc and logloss of the test split; bytes, dense_bytes, optimizer_bytes and step_ms.

    Raises:
        DoesNotFit: if the method has no form this small.
    """
    torch.manual_seed(seed)
    compression = _compression_of_numbers(task, method, compression, DTYPES[dtype])
    model = Model(task, method, compression)
    embeddings = model.embeddings
    if method == "PEP":  # keep the initial values, without the entries that a trained copy's thresholds drop
        copied = copy.deepcopy(model)
        search = ThresholdSearch(copied.embeddings.tables, embeddings.budget, steps)
        _fit_(copied, task, method, compression, lr, seed, steps, search)
        for table, mask in zip(embeddings.tables, search.masks(), strict=True):
            table.mask = mask.float()
    pruning = Pruning(list(embeddings.tables.parameters()), embeddings.budget, steps) if method == "pruning" else None
    times = _fit_(model, task, method, compression, lr, seed, steps, pruning, is_bfloat16=dtype == "bfloat16")
    if dtype == "int8":
        round_(embeddings.tables, torch.int8)
    params = sum(p.numel() for p in embeddings.tables.parameters())
    values, indices = embeddings.num_bytes()
    if dtype != "float32":
        values = stored_bytes(embeddings.tables, DTYPES[dtype])
    return {
        **evaluate(model, task.data.test),
        "val_ne": evaluate(model, task.data.val)["ne"],
        "bytes": values + indices,
        "dense_bytes": 4 * sum(len(task.data.counts[f]) for f in embeddings.large) * task.dim,
        "index_bytes": indices,
        "optimizer_bytes": 8 * params,
        "other_bytes": 4 * (sum(p.numel() for p in model.parameters()) - params),
        "step_ms": statistics.median(times),
    }


def _compression_of_numbers(task: Task, method: str, compression: float, dtype: torch.dtype) -> float:
    """The compression in numbers that fills the budget of bytes."""
    budget = 4 * Model(task, method, compression).embeddings.budget
    fewer = compression * dtype.itemsize / 4
    while dtype != torch.float32:
        taken = stored_bytes(Model(task, method, fewer).embeddings.tables, dtype)
        if taken <= budget:
            break
        fewer *= max(taken / budget, 1.002)
    return fewer


def _fit_(
    model: Model,
    task: Task,
    method: str,
    compression: float,
    lr: float,
    seed: int,
    steps: int,
    shrink: Pruning | ThresholdSearch | None,
    *,
    is_bfloat16: bool = False,
) -> list[float]:
    """Train for `steps` steps, or until `shrink` is done; return the milliseconds of each step."""
    optimizer = optimizer_for(model, lr)
    scheduler = _scheduler(model, optimizer, method, steps)
    times = []
    best_ne, best_state = math.inf, None
    first = steps // 2 + 1 if method in SHRINKING else 1
    evaluations = 0 if isinstance(shrink, ThresholdSearch) else task.evaluations
    for step, rows in enumerate(task.data.batches(task.batch, steps, seed), start=1):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, (1 - (step - 1) / steps) / DECAY)
        loss = F.binary_cross_entropy_with_logits(model(rows), rows.labels)
        optimizer.zero_grad()
        (scheduler.loss(loss) if scheduler else loss).backward()
        optimizer.step()
        if is_bfloat16:
            round_stochastically_(model.embeddings.tables)
        times.append(1e3 * (time.perf_counter() - start))
        if scheduler:
            scheduler.step()
        if shrink and shrink.step():
            break
        if method == "TT SVD" and step == steps // 2:
            _to_tt_(model, task, compression)
            optimizer = optimizer_for(model, lr)
        if method == "CCE" and step in (steps // 4, steps // 2):
            _cluster_(model, optimizer)
        is_due = step * evaluations // steps > (step - 1) * evaluations // steps
        if is_due and step >= first and (ne := evaluate(model, task.data.val)["ne"]) < best_ne:
            best_ne, best_state = ne, copy.deepcopy(model.state_dict())
    if best_state is not None:
        model.load_state_dict(best_state)
    return times


def _scheduler(model: Model, optimizer: torch.optim.Optimizer, method: str, steps: int) -> RankScheduler | None:
    if method not in SCORES:
        return None
    score: Any = SCORES[method]
    config = RankConfig(
        early_steps=steps // 10, late_steps=2 * steps // 5, objective="budget", target_params=model.embeddings.budget,
        gamma=0.0, threshold=0.0, truncate_every=max(1, steps // 40), score=score,
    )  # fmt: skip
    return RankScheduler(model, optimizer, config)


@torch.no_grad()
def _to_tt_(model: Model, task: Task, compression: float) -> None:
    embeddings = model.embeddings
    weights = [weight.detach() for weight in embeddings.tables.parameters()]
    tables = [TT(config) for config in tt_tables([len(weight) for weight in weights], task.dim, compression)]
    fit_tables_([table.bag for table in tables], weights, embeddings.budget, [task.data.counts[f] for f in embeddings.large])
    embeddings.tables = nn.ModuleList(tables)


def _cluster_(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Cluster the rows of CCE's tables, and drop the optimizer's state of their old values."""
    for table in model.embeddings.tables:
        assert isinstance(table, Clustered)
        table.cluster_()
        for parameter in table.parameters():
            optimizer.state.pop(parameter, None)


@torch.no_grad()
def evaluate(model: Model, rows: Rows) -> dict[str, float]:
    """Compute ne, auc and logloss of a model on rows."""
    metrics = BinaryMetrics()
    for index in torch.arange(len(rows.labels)).split(16_384):
        part = rows.take(index)
        metrics.update(model(part), part.labels)
    computed = metrics.compute()
    return {name: float(computed[name]) for name in ("ne", "auc", "logloss")}


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
        selected.append(
            Task(
                data=feedback,
                dim=32,
                batch=2048,
                steps=20 if settings.quick else min(2000, 3 * epoch),  # longer training overfits with every method
                rates=RATES[:1] if settings.quick else RATES,
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
            is_tuned = seed == settings.seed and method not in VARIANTS
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
    """The rate with the smallest validation NE at this size; variants of rank scores share one, and so do fixed splits."""
    if shapes["method"] in SCORES and shapes["method"] in VARIANTS:
        shapes = {**shapes, "method": "TT adaptive"}
    if shapes["method"] in SPLITS:
        shapes = {**shapes, "method": "TT + rows"}
    tuned = _select(rows, shapes)
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
