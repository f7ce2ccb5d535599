"""How well models predict whose tables take equally many bytes.

A small DLRM on synthetic Criteo logs, and a factorization model on MovieLens-like implicit feedback (`quality_data.py`), with large
tables held in every way of `quality_tables.py`, at 10 to 500 times fewer bytes, values and index buffers counted. Batches, steps,
optimizer (Adam), and the rest of the model are the same for all. The learning rate of the tables is chosen for each method and data
set by the validation NE of seed 0. One row a run: NE on the test split; AUC, logloss and bytes are in `counted`.

    TT adaptive     starts at twice the budget, shrinks to it exactly between 20 % and 70 % of the steps, ranks scored by Taylor
    TT SVD          trained dense for half of the steps, then TT-SVD within the budget, ranks spread over tables, then trained on
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.environment import describe
from benchmarks.measure import Settings
from benchmarks.quality_data import DataSet, ImplicitFeedback, Rows, Synth
from benchmarks.quality_tables import DoesNotFit, Embeddings, Train, tt_shapes
from benchmarks.rows import Row
from comera_rec import RankConfig, RankScheduler, rank_param_groups, tt_svd_within_budget
from comera_rec.training.metrics import BinaryMetrics

BUDGETS = (10, 50, 100, 200, 500)
METHODS = ("dense", "TT fixed", "TT adaptive", "TT SVD", "hashing", "QR", "low rank", "mixed dim", "pruning")
SCORES = {"TT adaptive": "taylor", "TT adaptive norm": "norm", "TT adaptive magnitude": "magnitude"}
TUNE_AT = (50, 10)  # the first that a method has
SEEDS = 3
LR_HEAD = 0.002


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, how long to train on it, and the learning rates to choose from."""

    data: DataSet
    dim: int
    batch: int
    steps: int
    rates: tuple[float, ...]


class Head(nn.Module):
    """From [B, F, N] and integers [B, I] to logits [B]: DLRM's interaction and MLPs.

    Without integers a weighted inner product and a linear part, as in a factorization machine.
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
        kind, shapes = method, None
        if method.startswith("TT"):
            kind = "dense" if method == "TT SVD" else "TT"
            large = Embeddings(counts, task.dim, "dense", compression).large
            shapes = tt_shapes([len(counts[f]) for f in large], task.dim, compression)
            if method in SCORES:  # the same modes as at the budget, twice the size
                shapes = tt_shapes([len(counts[f]) for f in large], task.dim, compression / 2, shapes[0].order)
        self.embeddings = Embeddings(counts, task.dim, kind, compression, shapes)
        self.head = Head(len(counts), task.dim, task.data.test.dense.shape[1])

    def forward(self, rows: Rows) -> Tensor:
        logits: Tensor = self.head(self.embeddings(rows.ids), rows.dense)
        return logits


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam; tables at the rate given, rank parameters at a tenth of it, the head at its own."""
    assert isinstance(model, Model)
    groups = [g for g in rank_param_groups(model, lr_cores=lr, lr_ranks=lr / 10, lr_dense=LR_HEAD) if g["name"] != "dense"]
    special = {id(p) for group in groups for p in group["params"]}
    tables = [p for p in model.embeddings.parameters() if id(p) not in special]
    groups += [{"params": tables, "lr": lr}] if tables else []
    return torch.optim.Adam([*groups, {"params": list(model.head.parameters()), "lr": LR_HEAD}], fused=True)


def train(task: Task, method: str, compression: float, lr: float, seed: int, split: str) -> dict[str, float]:
    """Train one model and evaluate it on a split: ne, auc, logloss, bytes, dense_bytes, optimizer_bytes, step_ms.

    Raises:
        DoesNotFit: if the method has no form this small.
    """
    torch.manual_seed(seed)
    model = Model(task, method, compression)
    optimizer = optimizer_for(model, lr)
    scheduler = _scheduler(model, optimizer, method, task.steps)
    times = []
    for step, rows in enumerate(task.data.batches(task.batch, task.steps, seed), start=1):
        start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(rows), rows.labels)
        optimizer.zero_grad()
        (scheduler.loss(loss) if scheduler else loss).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        if scheduler:
            scheduler.step()
        if method == "pruning":
            _prune_(model, step / task.steps)
        if method == "TT SVD" and step == task.steps // 2:
            _to_trains_(model, task, compression)
            optimizer = optimizer_for(model, lr)
    metrics = evaluate(model, getattr(task.data, split))
    embeddings = model.embeddings
    values = embeddings.large_params()
    held = 8 * sum(int((p != 0).sum()) for p in embeddings.tables.parameters()) if method == "pruning" else 4 * values
    return {
        **metrics,
        "bytes": held,
        "dense_bytes": 4 * sum(len(task.data.counts[f]) for f in embeddings.large) * task.dim,
        "index_bytes": held / 2 if method == "pruning" else 0,
        "optimizer_bytes": 8 * values,
        "other_bytes": 4 * (sum(p.numel() for p in model.parameters()) - values),
        "step_ms": statistics.median(times),
    }


def _scheduler(model: Model, optimizer: torch.optim.Optimizer, method: str, steps: int) -> RankScheduler | None:
    if method not in SCORES:
        return None
    score: Any = SCORES[method]
    config = RankConfig(
        early_steps=steps // 5, late_steps=steps // 2, objective="budget", target_params=model.embeddings.budget,
        gamma=0.0, threshold=0.0, truncate_every=max(1, steps // 40), score=score,
    )  # fmt: skip
    return RankScheduler(model, optimizer, config)


@torch.no_grad()
def _prune_(model: Model, progress: float) -> None:
    """Zero the smallest entries of the large tables, down to the budget at 70 % of the steps; zeros come back as zeros."""
    weights = list(model.embeddings.tables.parameters())
    total, final = sum(w.numel() for w in weights), model.embeddings.budget // 2  # value and index
    ramp = min(1.0, max(0.0, (progress - 0.2) / 0.5))
    keep = int(final + (total - final) * (1 - ramp) ** 3)
    if keep < total:
        magnitudes = torch.cat([w.flatten() for w in weights]).abs()
        mask = torch.zeros(total, dtype=torch.bool)
        mask[magnitudes.topk(keep).indices] = True
        for weight, kept in zip(weights, mask.split([w.numel() for w in weights]), strict=True):
            weight.mul_(kept.view_as(weight))


@torch.no_grad()
def _to_trains_(model: Model, task: Task, compression: float) -> None:
    embeddings = model.embeddings
    weights = [weight.detach() for weight in embeddings.tables.parameters()]
    shapes = tt_shapes([len(weight) for weight in weights], task.dim, compression)
    trains = tt_svd_within_budget(weights, shapes, embeddings.budget)
    for k, (weight, shape, cores) in enumerate(zip(weights, shapes, trains, strict=True)):
        table = Train(len(weight), task.dim, shape)
        table.bag.set_cores_(cores)
        embeddings.tables[k] = table


@torch.no_grad()
def evaluate(model: Model, rows: Rows) -> dict[str, float]:
    """ne, auc, logloss."""
    metrics = BinaryMetrics()
    for index in torch.arange(len(rows.labels)).split(16_384):
        part = rows.take(index)
        metrics.update(model(part), part.labels)
    found = metrics.compute()
    return {name: float(found[name]) for name in ("ne", "auc", "logloss")}


def tasks(settings: Settings) -> list[Task]:
    """The data sets: synthetic always, implicit feedback where its folder is given."""
    if settings.quick:
        found = [Task(data=Synth(20_000, 0.02), dim=8, batch=128, steps=20, rates=(0.01,))]
    else:
        found = [Task(data=Synth(300_000, 0.02), dim=16, batch=2048, steps=120, rates=(0.003, 0.01))]
    if settings.data:
        found.append(
            Task(
                data=ImplicitFeedback(settings.data),
                dim=32,
                batch=4096,
                steps=20 if settings.quick else 600,
                rates=(0.003, 0.01, 0.03),
            )
        )
    return [task for task in found if settings.only.get("data", task.data.name) == task.data.name]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Runs that are not among `settings.finished`, one row each: learning rates first, then budgets, seed by seed."""
    environment = describe(settings.device)
    done = {_key(row) for row in settings.finished}
    rows = list(settings.finished)
    for task in tasks(settings):
        for pass_, method, compression, lr, seed in tqdm(
            list(_plan(task, settings)), desc=task.data.name, unit="run", disable=None
        ):
            lr = lr or _best_rate(rows, task, method)
            shapes = {"data": task.data.name, "method": method, "compression": compression, "lr": lr, "steps": task.steps}
            if lr is None or (pass_, *_named(shapes, pass_), seed) in done:
                continue
            try:
                found = train(task, method, compression, lr, seed, "val" if pass_ == "tune" else "test")
            except DoesNotFit:
                continue
            ne = found.pop("ne")
            row = Row(
                op="quality", provider=method, shapes={**shapes, "dim": task.dim, "batch": task.batch}, dtype="float32",
                pass_=pass_, p20=ne, p50=ne, p80=ne, unit="NE", samples=1, ratios={}, counted=found, **environment, seed=seed,
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )  # fmt: skip
            rows.append(row)
            yield [row]


def _plan(task: Task, settings: Settings) -> Iterator[tuple[str, str, int, float | None, int]]:
    """(pass, method, compression, learning rate or None for the tuned one, seed)."""
    quick = settings.quick
    for method in METHODS:
        for lr in task.rates[:1] if quick else task.rates:
            for compression in TUNE_AT[-1:] if method in ("dense", "low rank", "QR") or quick else TUNE_AT[:1]:
                yield "tune", method, compression, lr, 0
    for seed in range(settings.seed, settings.seed + (1 if quick else SEEDS)):
        for compression in BUDGETS[:1] if quick else BUDGETS:
            for method in METHODS:
                if method != "dense" or compression == BUDGETS[0]:
                    yield "test", method, compression, None, seed
        for compression in () if quick else (50,):
            for method in ("TT adaptive norm", "TT adaptive magnitude"):
                yield "test", method, compression, None, seed


def _best_rate(rows: Sequence[Row], task: Task, method: str) -> float | None:
    """The rate of the smallest validation NE; all scores of ranks share one."""
    method = "TT adaptive" if method in SCORES else method
    tuned = [r for r in rows if r.pass_ == "tune" and r.provider == method and r.shapes["data"] == task.data.name]
    return min(tuned, key=lambda row: row.p50).shapes["lr"] if tuned else None


def _named(shapes: dict[str, Any], pass_: str) -> tuple[Any, ...]:
    return shapes["data"], shapes["method"], shapes["compression"], shapes["lr"] if pass_ == "tune" else None


def _key(row: Row) -> tuple[Any, ...]:
    return row.pass_, *_named(row.shapes, row.pass_), row.seed


def format_case(rows: Sequence[Row]) -> str:
    """One line a run."""
    return "\n".join(
        f"{row.pass_} {row.shapes['data']} {row.provider} {row.shapes['compression']}x lr {row.shapes['lr']} seed {row.seed}: "
        f"NE {row.p50:.4f}, AUC {row.counted['auc']:.4f}, {row.counted['bytes']:,.0f} bytes, {row.counted['step_ms']:.1f} ms/step"
        for row in rows
    )
