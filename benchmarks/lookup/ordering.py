"""The order of ids: by frequency, as `comera preprocess` assigns them, by communities of ids that co-occur, and at random.

EL-Rec (Wang et al., SC 2022, its index reordering) keeps the most frequent ids in front and numbers the others by communities of
co-occurring ids, so that a batch uses fewer leading digits of a TT table. Here the communities are those that the log was drawn
from, the best result that community detection could give.

Why frequency alone is hard to beat: a batch of B independently drawn ids uses, on average, the sum over leading digits p of
1 - (1 - P_p)^B digits, where P_p is the share of ids with digit p. That is concave in each P_p, so the most uneven shares give the
smallest sum, and no order is more uneven than by frequency. Communities can only help if batches hold rows that are close together
in the log, which shuffling prevents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import Sizes
from comera_rec.ops import LookupPlan, plan_lookup

ZIPF = 1.05
BATCHES = 128
HOT = 0.01  # share of the ids that stay in front of the communities
ACTIVE = 0.05  # share of the communities that a stretch of the log is about
ABOUT = 0.8  # share of its rows that are about them


@dataclass(frozen=True, kw_only=True)
class OrderCase(Sizes):
    """A table, and a log in which each stretch of one batch is about some of the communities.

    batches: "in order" of the log, or with rows "shuffled" as in training.
    """

    rows: int = 1_000_000
    dim: int = 64
    order: int
    rank: int = 16
    batch: int = 16_384
    communities: int = 1_000
    batches: str


def cases(quick: bool) -> list[OrderCase]:
    sized = partial(OrderCase, rows=20_000, batch=1_024, communities=50) if quick else OrderCase
    return [sized(order=order, batches=batches) for order in (2, 3) for batches in ("shuffled", "in order")]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time forward and backward of one table, and count unique digits, for the same log under each order of the ids."""
    for case, rows in each_case("ordering", cases(settings.quick), settings):
        draw = np.random.default_rng(settings.seed)
        ids, community = draw_log(case, draw)
        orders = {
            "frequency": np.arange(case.rows),
            "communities": by_community(community),
            "random": draw.permutation(case.rows),
        }
        shape = cr.TTShape.for_table(case.rows, case.dim, tt_ranks=case.rank, order=case.order)
        bag = cr.TTEmbeddingBag(case.rows, case.dim, shape=shape)
        batches = {name: [torch.from_numpy(order[batch]) for batch in ids] for name, order in orders.items()}
        dense = bag.to_dense().weight.detach()
        for name, order_name in batches.items():
            require_agreement({"output": dense[order_name[0]].double()}, {name: {"output": _look_up(bag, order_name, 0).detach()}})
        del dense
        samples = alternate({name: partial(_step, bag, order_name) for name, order_name in batches.items()}, settings.plan)
        counted = {name: count(shape, order_name) for name, order_name in batches.items()}
        yield rows("forward+backward", "ms", samples, counted, ("frequency",))


def draw_log(case: OrderCase, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw ids [batches, batch], ordered by their frequency in an infinite log, and the community of each id.

    Most rows of a stretch belong to its active communities.
    """
    community = draw.integers(0, case.communities, case.rows)
    weights = np.arange(1, case.rows + 1) ** -ZIPF
    ids = np.empty((BATCHES, case.batch), np.int64)
    for stretch in ids:
        about = weights * (draw.random(case.communities) < ACTIVE)[community]
        cumulative = np.cumsum((1 - ABOUT) * weights / weights.sum() + ABOUT * about / max(about.sum(), weights[-1]))
        stretch[:] = np.searchsorted(cumulative, draw.random(case.batch) * cumulative[-1])
    if case.batches == "shuffled":
        ids = draw.permutation(ids.ravel()).reshape(ids.shape)
    return ids, community


def by_community(community: np.ndarray) -> np.ndarray:
    """Map ids by frequency to new ids: hot ids stay, the others are sorted by community, then by frequency."""
    hot = int(HOT * len(community))
    order = np.concatenate([np.arange(hot), hot + np.argsort(community[hot:], kind="stable")])
    return np.argsort(order)


def count(shape: cr.TTShape, batches: list[Tensor]) -> dict[str, float]:
    """Average over batches the unique ids, and the unique rows of left parts, which the leading digits number."""
    plans = [plan for batch in batches if isinstance(plan := plan_lookup([batch], [shape.row_shape]), LookupPlan)]
    rows = [int(plan.bounds[0, -1]) for plan in plans]
    lefts = [len(plan.rows[0, :count].unique()) for plan, count in zip(plans, rows, strict=True)]
    return {"unique_ids": float(np.mean(rows)), "unique_left_ids": float(np.mean(lefts))}


def _look_up(bag: cr.TTEmbeddingBag, batches: list[Tensor], turn: int) -> Tensor:
    ids = batches[turn % len(batches)]
    pooled: Tensor = bag(ids, torch.arange(len(ids)))
    return pooled


def _step(bag: cr.TTEmbeddingBag, batches: list[Tensor], turn: int) -> None:
    bag.zero_grad()
    _look_up(bag, batches, turn).sum().backward()
