"""Groups of parameters; the differentiable size, whose gradient is the cost of one rank, and the mean square of cores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comera_rec import TTEmbeddingBag, TTLinear, TTShape
from comera_rec.rank import core_norm, count_tt_params, rank_param_groups, size_surrogate


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


def test_empty_groups_are_left_out() -> None:
    assert [group["name"] for group in rank_param_groups(nn.Linear(3, 3), lr_cores=1, lr_ranks=1, lr_dense=1)] == ["dense"]


@pytest.mark.parametrize("name", ["lr_cores", "lr_ranks", "lr_dense"])
def test_negative_rates_are_refused(name: str) -> None:
    rates = {"lr_cores": 0.1, "lr_ranks": 0.1, "lr_dense": 0.1, name: -1.0}
    with pytest.raises(ValueError, match=f"{name} is -1.0: give a non-negative learning rate"):
        rank_param_groups(nn.Linear(3, 3), **rates)


MODULES = {
    "table of order 2": lambda: TTEmbeddingBag(100, 16, tt_ranks=5),
    "table of order 3": lambda: TTEmbeddingBag(100, 16, tt_ranks=(5, 3)),
    "table of order 4": lambda: TTEmbeddingBag(100, 16, tt_ranks=(5, 3, 2)),
    "table of order 1": lambda: TTEmbeddingBag(10, 4, shape=TTShape((10,), (4,), ())),
    "linear": lambda: TTLinear(64, 48, tt_ranks=6),
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


def test_a_halved_rank_parameter_counts_half() -> None:
    module = TTEmbeddingBag(100, 16, shape=TTShape((10, 10), (4, 4), 2))
    with torch.no_grad():
        module.rank_1.copy_(torch.tensor([[0.5], [-1.0]]))
    assert float(size_surrogate([module]).detach()) == 40 * 1.5 + 1.5 * 40 + 1.5


def test_sums_skip_modules_without_parameters() -> None:
    model = nn.Sequential(TTLinear(64, 48, tt_ranks=6), nn.Linear(48, 8), TTLinear(8, 8, tt_ranks=2))
    assert float(size_surrogate([model[0], model[2]]).detach()) == count_tt_params(model)
    assert count_tt_params(model) == model[0].shape.num_params + model[2].shape.num_params
    model[2].resize_ranks_((0, 0, 0))
    assert float(size_surrogate([model[0], model[2]]).detach()) == model[0].shape.num_params == count_tt_params(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_of_16_bit_modules_are_exact(dtype: torch.dtype) -> None:
    modules = [TTEmbeddingBag(1_000_000, 64, tt_ranks=16, dtype=dtype), TTLinear(64, 48, tt_ranks=6)]
    for ordered in (modules, modules[::-1]):
        size = size_surrogate(ordered)
        assert float(size.detach()) == sum(module.shape.num_params for module in modules)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(size + core_norm(ordered), modules[0].rank_parameters()))
    with torch.no_grad():
        modules[0].core_0.fill_(300.0)  # whose square float16 can't hold
    assert core_norm(modules).isfinite()


def test_core_norm_is_the_mean_square_of_the_cores() -> None:
    module = TTEmbeddingBag(100, 16, tt_ranks=5)
    with torch.no_grad():
        module.core_0.fill_(2.0)
        module.core_1.fill_(1.0)
    assert float(core_norm([module]).detach()) == 2.5
    module.resize_ranks_((0,))
    assert float(core_norm([module])) == 0.0
    assert float(size_surrogate([module])) == 0.0
