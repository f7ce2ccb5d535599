"""Frequencies of ids that drift: a DLRM is trained on two days, each once, and tested on a third like the second.

From the first day to the second, a share of the 2,000 most frequent ids of each column trade frequencies with rarer ones. Effects
of ids stay the same.

continued      trained further as it is
reranked       after `rerank_hot_rows_` with the second day's counts
ordered        ids ordered by the second day's frequencies from the start: the most that hot rows could gain
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from comera_rec.nn import rerank_hot_rows_, update_in_backward_
from comera_rec.recsys import build_dlrm

COLUMNS, FREQUENT, BATCH, DIM = 8, 2000, 512, 16
Day = tuple[Tensor, Tensor]
"""Ids [rows, columns] and labels [rows]."""


@dataclass(frozen=True, kw_only=True)
class Drift(Sizes):
    """`share`: of the frequent ids that become rare."""

    share: float
    ids: int = 20_000
    rows: int = 100_000


def run(settings: Settings) -> Iterator[list[Row]]:
    """Train and test for each share, with several seeds."""
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))
    cases = [Drift(share=share) for share in (0.0, 0.1, 0.2)]
    if settings.quick:
        cases = [Drift(share=0.2, ids=4000, rows=2048)]
    for case, rows in each_case("drift", cases, settings):
        found = [_entropies(case, seed) for seed in seeds]
        yield rows("test", "NE", {method: [each[method] for each in found] for method in found[0]}, {})


def _entropies(case: Drift, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    rank_of = np.stack([_drifted(case, rng) for _ in range(COLUMNS)])  # on the second day, [columns, ids]
    effects, factors = rng.normal(size=(COLUMNS, case.ids)) * 0.5, rng.normal(size=(COLUMNS, case.ids, 3)) * 0.35

    def day(rows: int, id_of: np.ndarray | None) -> Day:
        chances = 1 / (np.arange(case.ids) + 10.0) ** 1.1
        ids = rng.choice(case.ids, size=(rows, COLUMNS), p=chances / chances.sum())
        if id_of is not None:
            ids = np.stack([id_of[c][ids[:, c]] for c in range(COLUMNS)], axis=1)
        of_ids = np.stack([factors[c][ids[:, c]] for c in range(COLUMNS)])
        pairs = (of_ids.sum(0) ** 2).sum(1) - (of_ids**2).sum((0, 2))
        logits = sum(effects[c][ids[:, c]] for c in range(COLUMNS)) + 0.5 * pairs - 1.2
        return torch.from_numpy(ids), torch.from_numpy(rng.random(rows) < 1 / (1 + np.exp(-logits))).float()

    id_of = rank_of.argsort(axis=1)
    days = [day(case.rows, None), day(case.rows, id_of), day(case.rows // 2, id_of)]
    ordered = [(torch.stack([torch.from_numpy(rank_of[c])[ids[:, c]] for c in range(COLUMNS)], 1), y) for ids, y in days]
    model, optimizer = _model(case, seed)
    _train(model, optimizer, days[0])
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    counts = {f"t{c}": torch.bincount(days[1][0][:, c], minlength=case.ids) for c in range(COLUMNS)}
    rerank_hot_rows_(twin, twin_optimizer, counts)
    _train(model, optimizer, days[1])
    _train(twin, twin_optimizer, days[1])
    right, right_optimizer = _model(case, seed)
    for each in ordered[:2]:
        _train(right, right_optimizer, each)
    return {"continued": _test(model, days[2]), "reranked": _test(twin, days[2]), "ordered": _test(right, ordered[2])}


def _drifted(case: Drift, rng: np.random.Generator) -> np.ndarray:
    """Return the second day's rank by frequency of each id; on the first day, it is the id."""
    rank_of, most = np.arange(case.ids), min(FREQUENT, case.ids // 2)
    size = int(case.share * most)
    frequent, rare = rng.choice(most, size, replace=False), rng.choice(np.arange(most, case.ids), size, replace=False)
    rank_of[frequent], rank_of[rare] = rare, frequent
    return rank_of


def _model(case: Drift, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=f"t{c}", num_embeddings=case.ids, embedding_dim=DIM, feature_names=[f"f{c}"])
        for c in range(COLUMNS)
    ]
    configs = cr.TableCompression(compression=20, hot_rows="auto", min_rows=100).table_configs(tables)
    model = build_dlrm(configs, dense_in_features=0, dense_arch_layer_sizes=[DIM], over_arch_layer_sizes=[128, 64, 1], linears=None)
    cores = [parameter for name, parameter in model.named_parameters() if "tt_bags" in name]
    others = [parameter for name, parameter in model.named_parameters() if "tt_bags" not in name]
    return model, torch.optim.Adam([{"params": cores, "lr": 3e-3}, {"params": others, "lr": 2e-3}])


def _batches(day: Day) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    for ids, labels in zip(*(each.split(BATCH) for each in day), strict=True):
        lengths = torch.ones(ids.numel(), dtype=torch.long)
        yield KeyedJaggedTensor([f"f{c}" for c in range(COLUMNS)], ids.T.flatten(), lengths=lengths), labels


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, day: Day) -> None:
    update_in_backward_(model, optimizer)
    for features, labels in _batches(day):
        optimizer.zero_grad()
        _loss(model, features, labels).mean().backward()
        optimizer.step()


@torch.no_grad()
def _test(model: nn.Module, day: Day) -> float:
    losses = [_loss(model, features, labels) for features, labels in _batches(day)]
    rate = float(day[1].mean())
    return float(torch.cat(losses).mean()) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _loss(model: nn.Module, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
    logits = model(torch.empty(len(labels), 0), features).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
