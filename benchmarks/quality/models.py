"""A model with tables of one form, trained and evaluated on one data set.

TT adaptive     starts at twice the budget and shrinks to it between 10 % and 50 % of the steps, by Taylor scores of ranks
TT + rows adaptive
                starts at one and a half times the budget and shrinks likewise, in ranks and in columns of hot rows
TT SVD          trains dense for half of the steps, then applies TT-SVD within the budget, with ranks spread over tables and
                errors weighted by how often rows are read, then trains on
converted       trains dense to the end, then applies TT-SVD likewise
converted in order
                the same, with similar rows of the trained tables as neighbors; the budget pays for the order
"""

import copy
import math
import statistics
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.data_sets import DataSet, Rows
from benchmarks.quality.embeddings import TT, Embeddings, tt_configs
from benchmarks.quality.storage import BITS, DTYPES, round_, round_dense_, round_stochastically_, stored_bytes
from benchmarks.quality.tables import STD
from comera_rec import RankConfig, RankScheduler
from comera_rec.convert import fit_tables_
from comera_rec.convert.compress import similar_rows
from comera_rec.rank import rank_param_groups
from comera_rec.training.evaluation import BinaryMetrics

RATES = (0.003, 0.01, 0.03)
START_RATES = (0.0003, 0.001, 0.003)
"""Those tried first from vectors, unless there is a teacher."""
LR_HEAD = 0.002
DECAY = 0.5  # part of the steps in which rates fall
ADAPTIVE = ("TT adaptive", "TT + rows adaptive")
CONVERTED = ("converted", "converted in order")
SHRINKING = (*ADAPTIVE, "TT SVD")
"""These have their final form after half of the steps."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, how long to train on it, the learning rates to try first, and the standard deviation of initial entries.

    With `evaluations` > 0 the validation split is evaluated so often during training, and the best state is kept: early stopping.
    `start` is "random", or "vectors" for tables that start from those of the data set. `teacher` is "none", or "dense" to learn the
    predictions of a trained dense model instead of the labels.
    """

    data: DataSet
    dim: int
    batch: int
    steps: int
    rates: tuple[float, ...] = RATES
    std: float = STD
    evaluations: int = 0
    start: str = "random"
    teacher: str = "none"


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
        kind = "dense" if method in ("TT SVD", *CONVERTED, *BITS) else method
        self.embeddings = Embeddings(task.data.counts, task.dim, kind, compression, task.std)
        self.head = Head(len(task.data.counts), task.dim, task.data.test.dense.shape[1])

    def forward(self, rows: Rows) -> Tensor:
        logits: Tensor = self.head(self.embeddings(rows.ids), rows.dense)
        return logits


def optimizer_for(model: Model, lr: float) -> torch.optim.Optimizer:
    """Adam with rate `lr` for tables, a tenth of it for rank parameters, and `LR_HEAD` for the head."""
    groups = [g for g in rank_param_groups(model, lr_cores=lr, lr_ranks=lr / 10, lr_dense=LR_HEAD) if g["name"] != "dense"]
    special = {id(p) for group in groups for p in group["params"]}
    tables = [p for p in model.embeddings.parameters() if id(p) not in special]
    groups += [{"params": tables, "lr": lr}] if tables else []
    groups += [{"params": list(model.head.parameters()), "lr": LR_HEAD}]
    return torch.optim.Adam([{**group, "initial_lr": group["lr"]} for group in groups], fused=True)


def train(task: Task, method: str, compression: float, lr: float, seed: int, dtype: str = "float32") -> dict[str, float]:
    """Train one model; return val_ne; ne, auc and logloss of the test split; bytes, dense_bytes, index_bytes and step_ms.

    Raises:
        DoesNotFit: if the method has no form this small.
    """
    torch.manual_seed(seed)
    compression = _compression_of_numbers(task, method, compression, DTYPES[dtype])
    model = Model(task, method, compression)
    embeddings = model.embeddings
    times = fit_(model, task, method, compression, lr, seed, dtype)
    if method in CONVERTED:
        _to_tt_(model, task, compression, in_order=method == "converted in order")
    if dtype == "int8":
        round_(embeddings.tables, torch.int8)
    values, indices = embeddings.num_bytes()
    if dtype != "float32":
        values = stored_bytes(embeddings.tables, DTYPES[dtype])
    if method in BITS:
        values = sum(round_dense_(weight.data, BITS[method]) for weight in embeddings.tables.parameters())
    return {
        **evaluate(model, task.data.test),
        "val_ne": evaluate(model, task.data.val)["ne"],
        "bytes": values + indices,
        "dense_bytes": 4 * sum(len(task.data.counts[f]) for f in embeddings.large) * task.dim,
        "index_bytes": indices,
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


def fit_(model: Model, task: Task, method: str, compression: float, lr: float, seed: int, dtype: str = "float32") -> list[float]:
    """Train for the task's steps; return the milliseconds of each step."""
    teacher = _teacher(replace(task, teacher="none"), seed) if task.teacher != "none" else None
    if task.start == "vectors":
        model.embeddings.start_(task.data.vectors, task.data.counts)
    steps, optimizer = task.steps, optimizer_for(model, lr)
    scheduler = _scheduler(model, optimizer, method, steps)
    times, best_ne, best_state = [], math.inf, None
    first = steps // 2 + 1 if method in SHRINKING else 1
    for step, rows in enumerate(task.data.batches(task.batch, steps, seed), start=1):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, (1 - (step - 1) / steps) / DECAY)
        if teacher is not None:
            rows = labeled_by(teacher, torch.cat([rows.ids, task.data.unlabeled_ids(rows)]), rows.dense)
        loss = F.binary_cross_entropy_with_logits(model(rows), rows.labels)
        optimizer.zero_grad()
        (scheduler.loss(loss) if scheduler else loss).backward()
        optimizer.step()
        if dtype == "bfloat16":
            round_stochastically_(model.embeddings.tables)
        times.append(1e3 * (time.perf_counter() - start))
        if scheduler:
            scheduler.step()
        if method == "TT SVD" and step == steps // 2:
            _to_tt_(model, task, compression)
            optimizer = optimizer_for(model, lr)
        is_due = step * task.evaluations // steps > (step - 1) * task.evaluations // steps
        if is_due and step >= first and (ne := evaluate(model, task.data.val)["ne"]) < best_ne:
            best_ne, best_state = ne, copy.deepcopy(model.state_dict())
    if best_state is not None:
        model.load_state_dict(best_state)
    return times


@lru_cache(1)
def _teacher(task: Task, seed: int) -> Model:
    """Train dense tables at each rate; return the model with the best NE on the validation split."""
    models = []
    for lr in RATES if task.start == "random" else START_RATES:
        torch.manual_seed(seed)
        models.append(Model(task, "dense", 1))
        fit_(models[-1], task, "dense", 1, lr, seed)
    return min(models, key=lambda model: evaluate(model, task.data.val)["ne"])


@torch.no_grad()
def labeled_by(teacher: Model, ids: Tensor, dense: Tensor) -> Rows:
    """Return rows whose labels are a model's predictions (Hinton et al., Distilling the Knowledge, arXiv 1503.02531)."""
    rows = Rows(ids=ids, dense=F.pad(dense, (0, 0, 0, len(ids) - len(dense))), labels=torch.empty(len(ids)))
    return replace(rows, labels=teacher(rows).sigmoid())


def _scheduler(model: Model, optimizer: torch.optim.Optimizer, method: str, steps: int) -> RankScheduler | None:
    if method not in ADAPTIVE:
        return None
    config = RankConfig(
        early_steps=steps // 10, late_steps=2 * steps // 5, objective="budget", target_params=model.embeddings.budget,
        gamma=0.0, threshold=0.0, truncate_every=max(1, steps // 40),
    )  # fmt: skip
    return RankScheduler(model, optimizer, config)


@torch.no_grad()
def _to_tt_(model: Model, task: Task, compression: float, *, in_order: bool = False) -> None:
    embeddings = model.embeddings
    weights = [weight.detach() for weight in embeddings.tables.parameters()]
    sizes, counts = [len(weight) for weight in weights], [task.data.counts[f] for f in embeddings.large]
    numbers = sum(sizes) * task.dim / compression - in_order * sum(sizes)
    tables = [TT(config) for config in tt_configs(sizes, task.dim, sum(sizes) * task.dim / numbers)]
    for table, weight, count in zip(tables, weights, counts, strict=True):
        if in_order:
            table.bag.set_row_order_(similar_rows(weight, count))
    fit_tables_([table.bag for table in tables], weights, int(numbers), counts)
    embeddings.tables = nn.ModuleList(tables)


@torch.no_grad()
def evaluate(model: Model, rows: Rows) -> dict[str, float]:
    """Compute ne, auc and logloss of a model on rows."""
    metrics = BinaryMetrics()
    for index in torch.arange(len(rows.labels)).split(16_384):
        part = rows.take(index)
        metrics.update(model(part), part.labels)
    computed = metrics.compute()
    return {name: float(computed[name]) for name in ("ne", "auc", "logloss")}
