"""Parameter groups: every trainable parameter is in one group, the one with its learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comera_rec import TTEmbeddingBag, TTLinear
from comera_rec.rank import rank_param_groups


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
