"""Selections within a budget: at most the budget, close to it where ranks allow, and without the least valuable ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comera_rec import TTShape
from comera_rec.rank import within_budget

shapes = st.builds(
    lambda modes, rank: TTShape([m for m, _ in modes], [n for _, n in modes], rank),
    st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 8),
)


def random_scores(tables: list[TTShape], seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.rand(rank, generator=generator) for rank in shape.ranks] for shape in tables]


def size(tables: list[TTShape], masks: list[list[Tensor]], units: list[int]) -> int:
    kept = [shape.with_ranks([int(mask.sum()) for mask in each]) for shape, each in zip(tables, masks, strict=True)]
    return sum(unit * shape.num_params for unit, shape in zip(units, kept, strict=True))


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4])), min_size=1, max_size=4), st.floats(0, 1.2), st.integers(0, 99))
def test_at_most_the_budget(tables: list[tuple[TTShape, int]], fraction: float, seed: int) -> None:
    chosen, units = [shape for shape, _ in tables], [unit for _, unit in tables]
    scores = random_scores(chosen, seed)
    full = size(chosen, [[torch.ones(rank) for rank in shape.ranks] for shape in chosen], units)
    fixed = sum(unit * shape.num_params for shape, unit in tables if shape.order == 1)  # no rank to remove
    budget = max(fixed, int(fraction * full))
    for exact in (False, True):
        masks = within_budget(chosen, scores, budget, units, exact=exact)
        assert fixed <= size(chosen, masks, units) <= budget
        if budget >= full:
            assert all(mask.all() for each in masks for mask in each)
        for ranks, each in zip(scores, masks, strict=True):
            for score, mask in zip(ranks, each, strict=True):
                assert not mask.any() or mask.all() or score[mask].min() >= score[~mask].max(), "the best of each bond stay"


def test_value_is_weighed_against_cost() -> None:
    large, small = TTShape((100, 100), (4, 4), 2), TTShape((10, 10), (4, 4), 2)
    scores = [[torch.tensor([9.0, 5.0])], [torch.tensor([9.0, 1.0])]]  # a rank of the large table costs 10 times as much
    budget = large.num_params + small.num_params - 1
    masks = within_budget([large, small], scores, budget, exact=False)
    assert [mask.tolist() for each in masks for mask in each] == [[True, False], [True, True]]


@pytest.mark.parametrize("seed", range(5))
def test_close_to_the_best_of_all_choices(seed: int) -> None:
    tables = [TTShape((6 + 3 * i, 5 + i), (2, 2), 5) for i in range(4)]
    scores = random_scores(tables, seed)
    sums = [scores[i][0].sort(descending=True).values.cumsum(0).tolist() for i in range(4)]
    budget = sum(shape.num_params for shape in tables) // 2

    def value(ranks: tuple[int, ...]) -> float:
        return sum(sums[i][rank - 1] for i, rank in enumerate(ranks) if rank)

    fitting = [
        ranks
        for ranks in itertools.product(range(6), repeat=4)
        if sum(shape.with_ranks([r]).num_params for shape, r in zip(tables, ranks, strict=True)) <= budget
    ]
    masks = within_budget(tables, scores, budget)
    actual = value(tuple(int(mask.sum()) for each in masks for mask in each))
    assert actual >= 0.9 * max(map(value, fitting))


def test_a_lasting_module_is_emptied_only_if_the_budget_leaves_no_choice() -> None:
    table, block = TTShape((10, 10), (4, 4), 2), TTShape((50, 1), (1, 16), 2)
    scores = [[torch.tensor([1e-6, 1e-6])], [torch.tensor([9.0, 8.0])]]
    rank_1 = table.with_ranks([1]).num_params
    for budget, lasting, expected in (
        (rank_1 + block.num_params, [True, False], [1, 2]),
        (rank_1 + block.num_params // 2, [True, False], [1, 1]),
        (rank_1, [True, False], [1, 0]),
        (rank_1 - 1, [True, False], [0, 1]),
        (block.num_params // 2 - 1, [True, False], [0, 0]),
        (block.num_params, None, [0, 2]),
    ):
        masks = within_budget([table, block], scores, budget, lasting=lasting, exact=False)
        assert [int(mask.sum()) for (mask,) in masks] == expected


@given(st.lists(shapes, min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 99))
def test_no_lasting_module_is_emptied_where_all_fit_at_rank_1(tables: list[TTShape], fraction: float, seed: int) -> None:
    least = sum(shape.with_ranks([1] * len(shape.ranks)).num_params for shape in tables)
    budget = least + int(fraction * (sum(shape.num_params for shape in tables) - least))
    for exact in (False, True):
        masks = within_budget(tables, random_scores(tables, seed), budget, lasting=[True] * len(tables), exact=exact)
        assert all(mask.any() for each in masks for mask in each)
