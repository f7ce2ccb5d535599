"""Frequencies of ids that drift: a model of `quality` is trained on two days, each once, and tested on a third like the second.

From the first day to the second, a share of the 2,000 most frequent ids of each column trade frequencies with rarer ones. Effects
of ids stay the same.

continued      trained further as it is
reranked       after `rerank_hot_rows_` with the second day's counts
ordered        ids ordered by the second day's frequencies from the start: the most that hot rows could gain
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from benchmarks.quality.data_sets import DataSet, Rows
from benchmarks.quality.models import Model, Task, evaluate, fit_
from comera_rec.nn import rerank_hot_rows_

COLUMNS, FREQUENT, BATCH, DIM = 8, 2000, 512, 16
METHOD, COMPRESSION, RATE = "TT + rows", 20, 0.003


@dataclass(frozen=True, kw_only=True)
class Drift(Sizes):
    """`share`: of the frequent ids that become rare."""

    share: float
    ids: int = 20_000
    rows: int = 100_000


class Day(DataSet):
    """The rows of a day, to train or to test on."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray, num_ids: int) -> None:
        rows = Rows(ids=torch.from_numpy(ids), dense=torch.zeros(len(ids), 1), labels=torch.from_numpy(labels).float())
        self.train = self.val = self.test = rows
        self.counts = [torch.bincount(of_column, minlength=num_ids) for of_column in rows.ids.T]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Train and test for each share, with several seeds."""
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))
    cases = [Drift(share=0.2, ids=4000, rows=2048)] if settings.quick else [Drift(share=share) for share in (0.0, 0.1, 0.2)]
    for case, rows in each_case("drift", cases, settings):
        found = [_entropies(case, seed) for seed in seeds]
        yield rows("test", "NE", {method: [each[method] for each in found] for method in found[0]}, {})


def _entropies(case: Drift, seed: int) -> dict[str, float]:
    rng, columns = np.random.default_rng(seed), np.arange(COLUMNS)
    rank_of = np.stack([_drifted(case, rng) for _ in columns])  # on the second day, [columns, ids]
    effects, factors = rng.normal(size=(COLUMNS, case.ids)) * 0.5, rng.normal(size=(COLUMNS, case.ids, 3)) * 0.35
    chances = 1 / (np.arange(case.ids) + 10.0) ** 1.1

    def day(rows: int, id_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = id_of[columns, rng.choice(case.ids, size=(rows, COLUMNS), p=chances / chances.sum())]
        of_ids = factors[columns, ids]
        pairs = (of_ids.sum(1) ** 2 - (of_ids**2).sum(1)).sum(1)
        logits = effects[columns, ids].sum(1) + 0.5 * pairs - 1.2
        return ids, rng.random(rows) < 1 / (1 + np.exp(-logits))

    id_of = rank_of.argsort(axis=1)
    days = [day(case.rows, np.sort(rank_of)), day(case.rows, id_of), day(case.rows // 2, id_of)]
    first, second, third = (Day(ids, labels, case.ids) for ids, labels in days)
    in_order = [Day(rank_of[columns, ids], labels, case.ids) for ids, labels in days]
    continued, ordered = _trained(None, first, seed), _trained(None, in_order[0], seed)
    reranked = copy.deepcopy(continued)
    rerank_hot_rows_(reranked, None, {f"embeddings.tables.{c}.bag": count for c, count in enumerate(second.counts)})
    models = {"continued": (continued, second), "reranked": (reranked, second), "ordered": (ordered, in_order[1])}
    tested = {"continued": third, "reranked": third, "ordered": in_order[2]}
    return {name: evaluate(_trained(*how, seed), tested[name].test)["ne"] for name, how in models.items()}


def _drifted(case: Drift, rng: np.random.Generator) -> np.ndarray:
    """Return the second day's rank by frequency of each id; on the first day, it is the id."""
    rank_of, most = np.arange(case.ids), min(FREQUENT, case.ids // 2)
    size = int(case.share * most)
    frequent, rare = rng.choice(most, size, replace=False), rng.choice(np.arange(most, case.ids), size, replace=False)
    rank_of[frequent], rank_of[rare] = rare, frequent
    return rank_of


def _trained(model: Model | None, day: Day, seed: int) -> Model:
    """Train a model, by default a new one, on the rows of a day, each once."""
    task = Task(data=day, dim=DIM, batch=BATCH, steps=len(day.test.labels) // BATCH)
    torch.manual_seed(seed)
    model = model or Model(task, METHOD, COMPRESSION)
    fit_(model, task, METHOD, COMPRESSION, RATE, seed)
    return model
