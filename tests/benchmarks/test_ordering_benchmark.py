"""The benchmark of orders compares the same lookups under different ids."""

from __future__ import annotations

import numpy as np
import torch

import comera_rec as cr
from benchmarks.lookup.ordering import HOT, OrderCase, by_community, count, draw_log


def test_communities_are_contiguous_after_the_hot_ids() -> None:
    community = np.random.default_rng(0).integers(0, 7, 1000)
    ids = by_community(community)
    hot = int(HOT * 1000)
    assert sorted(ids) == list(range(1000))
    assert ids[:hot].tolist() == list(range(hot))
    assert (np.diff(community[hot:][np.argsort(ids[hot:])]) >= 0).all()


def test_communities_help_in_order_and_frequency_when_shuffled() -> None:
    """Count over a log long enough for every community to be active."""
    lefts = {}
    for batches in ("in order", "shuffled"):
        case = OrderCase(rows=20_000, order=2, batch=512, communities=100, batches=batches)
        ids, community = draw_log(case, np.random.default_rng(0))
        shape = cr.TTShape.for_table(case.rows, case.dim, tt_ranks=4, order=2)
        orders = {"frequency": np.arange(case.rows), "communities": by_community(community)}
        for name, order in orders.items():
            lefts[batches, name] = count(shape, [torch.from_numpy(order[batch]) for batch in ids])["unique_left_ids"]
    assert lefts["in order", "communities"] < lefts["in order", "frequency"]
    assert lefts["shuffled", "frequency"] < lefts["shuffled", "communities"]
