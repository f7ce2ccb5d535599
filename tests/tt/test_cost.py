"""The cost model: its counts are those of plans and cores, and more work costs more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from comera_rec.ops import plan_lookup
from comera_rec.tt import LookupCost, Work

COST = LookupCost()


def zipf(rows: int, lookups: int, exponent: float) -> torch.Tensor:
    weights = np.arange(1, rows + 1) ** -exponent
    return torch.from_numpy(np.random.default_rng(0).choice(rows, lookups, p=weights / weights.sum()))


@pytest.mark.parametrize("row_shape", [(1000, 700), (120, 7, 600), (40, 20, 30, 25), (5, 4, 3, 2)])
@pytest.mark.parametrize(("lookups", "exponent"), [(16_384, 1.05), (2_000, 1.3), (500, 0.5)])
def test_products_are_as_many_as_a_plan_makes(row_shape: tuple[int, ...], lookups: int, exponent: float) -> None:
    cost = LookupCost(lookups=lookups, exponent=exponent)
    plan = plan_lookup([zipf(math.prod(row_shape), lookups, exponent)], [row_shape])
    rows, lefts, rights = plan.bounds[:3, -1].tolist()
    planned = [count for count in (rows, lefts, rights) if count]
    # Products of 1 x 1 slices take one multiplication each, and one for each of the two gradients.
    work = cost.work(row_shape, (1,) * len(row_shape), (1,) * (len(row_shape) - 1))
    assert work.calls == len(planned)
    assert work.multiplies == pytest.approx(3 * sum(planned), rel=0.06)
    assert work.row_numbers == pytest.approx(rows, rel=0.06)


def test_an_order_2_step_counted_by_hand() -> None:
    U = COST.work((300, 200), (1, 1), (1,)).row_numbers
    assert COST.work((300, 200), (9, 20), (40,)) == Work(
        multiplies=pytest.approx(U * (40 * 9 * 2 + 20 * 9 * 3 + 9 * 40 * 2)),
        # (9 rows: 2 tiles) x (20 columns: one pair of vectors); 40 columns are a pair and one vector; 40 rows are 5 tiles.
        tile_steps=pytest.approx(U * (40 * 2 + 20 * 2 * 2 + 9 * 5)),
        missed_bytes=0.0,  # 200 x 40 x 20 numbers fit into the cache
        slice_numbers=40 * (300 * 9 + 200 * 20),
        lines=40 * 200 * 2,
        params=40 * (300 * 9 + 200 * 20),
        row_numbers=U * 180,
        calls=1,
        steps=1,
    )


def test_right_slices_beyond_the_cache_are_gathered_for_every_eight_rows() -> None:
    few, many = (COST.work((100, 50_000), (rows, 16), (32,)).missed_bytes for rows in (8, 9))
    assert 0 < few == many / 2


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_larger_rank_costs_more(order: int) -> None:
    times = [COST.milliseconds((50,) * order, (2,) * order, (rank,) * (order - 1)) for rank in (1, 4, 16, 64)]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_prices_times_work() -> None:
    cost = LookupCost(prices=Work(0, 0, 0, 0, 0, 2e6, 0, 0, 3e6))
    assert cost.milliseconds((10, 20), (3, 4), (5,)) == 2 * 5 * (10 * 3 + 20 * 4) + 3
