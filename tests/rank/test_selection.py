"""Scores of ranks, groups of parameters, the differentiable size, and selections of ranks within a budget."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag, TTLinear, TTShape
from comera_rec.nn import TTModule
from comera_rec.rank import core_norm, count_tt_params, rank_param_groups, size_surrogate, within_budget
from comera_rec.rank.importance import TaylorScores
from comera_rec.tt import contract


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = nn.ModuleDict({"table": TTEmbeddingBag(60, 16, tt_ranks=4), "layer": TTLinear(16, 12), "head": nn.Linear(12, 1)})
    model["head"].bias.requires_grad_(False)
    groups = {group["name"]: group for group in rank_param_groups(model, lr_cores=0.1, lr_ranks=0.2, lr_dense=0.3)}
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {key: sorted(name_of[id(p)] for p in group["params"]) for key, group in groups.items()}
    assert names == {
        "cores": ["layer.core_0", "layer.core_1", "layer.core_2", "layer.core_3", "table.core_0", "table.core_1"],
        "ranks": ["layer.rank_1", "layer.rank_2", "layer.rank_3", "table.rank_1"],
        "dense": ["head.weight", "layer.bias"],
    }
    assert {key: group["lr"] for key, group in groups.items()} == {"cores": 0.1, "ranks": 0.2, "dense": 0.3}
    torch.optim.Adam(list(groups.values()))
    # Empty groups are left out.
    rates = {"lr_cores": 0.1, "lr_ranks": 0.1, "lr_dense": 0.1}
    assert [group["name"] for group in rank_param_groups(nn.Linear(3, 3), **rates)] == ["dense"]
    for name in rates:
        refuse(f"{name} is -1.0: give a non-negative learning rate", rank_param_groups, nn.Linear(3, 3), **{**rates, name: -1.0})


MODULES: dict[str, Callable[[], TTModule]] = {
    "order 1": lambda: TTEmbeddingBag(10, 4, shape=TTShape((10,), (4,), ()), dtype=torch.float64),
    "order 2": lambda: TTEmbeddingBag(60, 16, tt_ranks=5, dtype=torch.float64),
    "order 3": lambda: TTEmbeddingBag(60, 16, tt_ranks=(5, 3), dtype=torch.float64),
    "order 4": lambda: TTEmbeddingBag(60, 16, tt_ranks=(3, 4, 2), dtype=torch.float64),
    "linear": lambda: TTLinear(24, 20, tt_ranks=4, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", MODULES)
def test_the_size_is_the_count_and_a_rank_is_priced_by_the_parameters_it_costs(kind: str) -> None:
    module = MODULES[kind]()
    for _ in range(2):
        size = size_surrogate([module])
        assert float(size.detach()) == module.shape.num_params
        for bond, rank in enumerate(module.rank_parameters()):
            fewer = list(module.shape.ranks)
            fewer[bond] -= 1
            price = module.shape.num_params - module.shape.with_ranks(fewer).num_params
            (gradient,) = torch.autograd.grad(size, rank, retain_graph=True)
            assert torch.equal(gradient, price * rank.sign())
        with torch.no_grad():
            for rank in module.rank_parameters():
                rank.neg_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_of_16_bit_modules_are_exact_and_vanished_ones_count_nothing(dtype: torch.dtype) -> None:
    modules = [TTEmbeddingBag(1_000_000, 64, tt_ranks=16, dtype=dtype), TTLinear(64, 48, tt_ranks=6), TTLinear(8, 8, tt_ranks=2)]
    modules[2].resize_ranks_((0, 0, 0))
    for ordered in (modules, modules[::-1]):
        size = size_surrogate(ordered)
        assert float(size.detach()) == sum(module.shape.num_params for module in modules) == count_tt_params(nn.ModuleList(ordered))
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(size + core_norm(ordered), modules[0].rank_parameters()))
    assert float(core_norm(modules[2:])) == float(size_surrogate(modules[2:])) == 0
    with torch.no_grad():
        modules[0].core_0.fill_(300.0)  # whose square float16 can't hold
    assert core_norm(modules).isfinite()


@pytest.fixture(params=list(MODULES)[1:])
def module(request: pytest.FixtureRequest) -> TTModule:
    module = MODULES[request.param]()
    with torch.no_grad():
        for rank in module.rank_parameters():
            rank.normal_()
    return module


def terms(module: TTModule, bond: int) -> list[Tensor]:
    """The matrix that each rank of a bond contributes."""
    rank, terms = module.rank_parameters()[bond], []
    for j in range(len(rank)):
        kept = rank.detach().clone()
        with torch.no_grad():
            rank.mul_(torch.arange(len(rank))[:, None] == j)
            terms.append(contract(module.scaled_cores()).reshape(module.shape.num_rows, module.shape.num_cols))
            rank.copy_(kept)
    return terms


def direction(module: TTModule) -> Tensor:
    """The gradient of the dense matrix."""
    return torch.randn(module.num_rows, module.num_cols, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def observed(module: TTModule, scale: float = 1.0) -> list[Tensor]:
    module.zero_grad()
    (scale * (module.dense_matrix() * direction(module)).sum()).backward()
    scores = TaylorScores({"layer": module})
    scores.observe()
    return scores.scores()["layer"]


def test_taylor_scores_are_squared_first_order_changes(module: TTModule) -> None:
    cut = slice(module.num_rows), slice(module.num_cols)
    expected = [
        torch.stack([(term[cut] * direction(module)).sum().square() for term in terms(module, bond)])
        for bond in range(module.shape.order - 1)
    ]
    total = torch.cat(expected).sum()
    torch.testing.assert_close(observed(module), [exact / total for exact in expected])


def test_neither_the_gauge_nor_the_scale_of_the_loss_matters(module: TTModule) -> None:
    before = observed(module)
    torch.testing.assert_close(observed(module, 65536.0), before)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():  # move factors between the cores and D, keeping the matrix the same
        for k, rank in enumerate(module.rank_parameters()):
            left, right = (10 ** torch.randn(2, len(rank), 1, generator=generator, dtype=torch.float64)).unbind()
            module.cores()[k].mul_(left.flatten())
            module.cores()[k + 1].mul_(right.view(-1, 1, 1, 1))
            rank.div_(left * right)
    torch.testing.assert_close(observed(module), before)


def test_scores_are_a_running_mean_of_shares() -> None:
    module = MODULES["order 2"]()
    scores = TaylorScores({"layer": module})
    shares = torch.eye(5, dtype=torch.float64)[:3]  # each step's loss depends on one rank only
    for share in shares:
        module.rank_1.grad = share[:, None] / module.rank_1.detach()
        scores.observe()
    expected = 0.98**2 * shares[0] + 0.98 * 0.02 * shares[1] + 0.02 * shares[2]
    torch.testing.assert_close(scores.scores()["layer"][0], expected)


def test_steps_without_finite_gradients_change_no_score() -> None:
    module = MODULES["order 2"]()
    scores = TaylorScores({"layer": module})
    refuse(r"step\(\) found no finite gradients: call it after optimizer.step\(\), before zero_grad", scores.scores)
    for gradient in (torch.ones(5), torch.full((5,), torch.inf), torch.zeros(5), None):
        module.rank_1.grad = None if gradient is None else gradient.double()[:, None]
        scores.observe(torch.sum)
        torch.testing.assert_close(scores.scores()["layer"][0], torch.full((5,), 0.2, dtype=torch.float64))


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


@settings(max_examples=200)
@given(
    st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4]), st.booleans()), min_size=1, max_size=4),
    st.floats(0, 1.2), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_at_most_the_budget(tables: list[tuple[TTShape, int, bool]], fraction: float, all_last: bool, seed: int) -> None:
    """Modules that last keep a rank where all of them fit at rank 1."""
    tables = [(shape, unit, lasts or all_last) for shape, unit, lasts in tables]
    chosen, units, lasting = (list(each) for each in zip(*tables, strict=True))
    scores = random_scores(chosen, seed)
    full = size(chosen, [[torch.ones(rank) for rank in shape.ranks] for shape in chosen], units)
    fixed = sum(unit * shape.num_params for shape, unit, _ in tables if shape.order == 1)  # no rank to remove
    least = sum(unit * shape.with_ranks([1] * len(shape.ranks)).num_params for shape, unit, lasts in tables if lasts)
    budget = max(fixed, int(fraction * full)) if fraction < 1 else fixed + least + int((fraction - 1) * full)
    for exact in (False, True):
        masks = within_budget(chosen, scores, budget, units, lasting=lasting, exact=exact)
        assert fixed <= size(chosen, masks, units) <= budget
        assert budget < fixed + least or all(mask.any() for of, lasts in zip(masks, lasting, strict=True) if lasts for mask in of)
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


def test_of_the_exchanges_that_fill_a_budget_the_one_that_loses_least_is_taken() -> None:
    """A rank of the first table makes room for one of either of the others."""
    tables = [TTShape((15, 10), (2, 2), 3), TTShape((15, 15), (2, 2), 3), TTShape((16, 15), (2, 2), 3)]  # a rank: 51, 61, 63
    scores = [[torch.tensor([9.0, 8.0, 3.0])], [torch.tensor([9.0, 8.0, 5.0])], [torch.tensor([9.0, 8.0, 1.0])]]
    for exact, expected in (False, [2, 2, 2]), (True, [1, 3, 2]):
        masks = within_budget(tables, scores, 2 * (51 + 61 + 63) + 12, exact=exact)
        assert [int(mask.sum()) for each in masks for mask in each] == expected


def test_a_lasting_module_is_emptied_only_if_the_budget_leaves_no_choice_and_least_ranks_stay() -> None:
    table, block = TTShape((10, 10), (4, 4), 2), TTShape((50, 1), (1, 16), 2)
    scores = [[torch.tensor([1e-6, 1e-6])], [torch.tensor([9.0, 8.0])]]
    rank_1 = table.with_ranks([1]).num_params
    for budget, lasting, least, expected in (
        (rank_1 + block.num_params, [True, False], None, [1, 2]),
        (rank_1 + block.num_params // 2, [True, False], None, [1, 1]),
        (rank_1, [True, False], None, [1, 0]),
        (rank_1 - 1, [True, False], None, [0, 1]),
        (block.num_params // 2 - 1, [True, False], None, [0, 0]),
        (block.num_params, None, None, [0, 2]),
        (rank_1 - 1, [False, True], [1, 0], [1, 0]),
        (rank_1 + block.num_params, None, [1, 0], [1, 2]),
    ):
        masks = within_budget([table, block], scores, budget, lasting=lasting, least=least, exact=False)
        assert [int(mask.sum()) for (mask,) in masks] == expected
