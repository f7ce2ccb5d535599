"""GaLore's forms and LTE follow their papers, as computed here by hand or by their authors' optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.linear.lte import LTELinear, lora_the_explorer_, merge_every_
from benchmarks.linear.rivals import Galore8bit, UpdateInBackward, galore, galore_groups, galore_is_installed

needs_galore = pytest.mark.skipif(not galore_is_installed(), reason="galore-torch is not installed")


@pytest.fixture
def layer() -> LTELinear:
    torch.manual_seed(0)
    layer = LTELinear(nn.Linear(6, 5), heads=3, rank=2, scale=4.0)
    nn.init.normal_(layer.up_NOr)
    return layer


@pytest.mark.parametrize("batch", [6, 7, 1])
def test_each_head_sees_its_shard_of_the_batch(layer: LTELinear, batch: int) -> None:
    input = torch.randn(batch, 4, 6)
    expected = F.linear(input, layer.weight, layer.bias)
    for shard, rows in enumerate(torch.arange(batch).tensor_split(3)):
        update = layer.up_NOr[shard] @ layer.down_NrI[shard]
        expected[rows] += 4.0 * input[rows] @ update.mT
    torch.testing.assert_close(layer(input), expected)


def test_merging_adds_the_mean_of_the_heads_to_the_weight_and_zeroes_them(layer: LTELinear) -> None:
    input, weight = torch.randn(3, 6), layer.weight.clone()
    update = sum(4.0 * up @ down for up, down in zip(layer.up_NOr, layer.down_NrI, strict=True)) / 3
    before = layer.eval()(input)
    layer.merge_()
    torch.testing.assert_close(layer.weight, weight + update)
    torch.testing.assert_close(layer(input), before)
    torch.testing.assert_close(layer.train()(input), before)
    assert not layer.up_NOr.any()
    assert not layer.weight.requires_grad


def test_heads_are_merged_periodically_and_moments_stay() -> None:
    torch.manual_seed(0)
    model = lora_the_explorer_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), heads=2, rank=3)
    assert isinstance(model[0], LTELinear)
    assert isinstance(model[2], nn.Linear), "the scores of two classes train in full"
    optimizer = merge_every_(torch.optim.Adam([p for p in model.parameters() if p.requires_grad]), model, steps=2)
    start = model[0].weight.clone()
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        assert bool(model[0].up_NOr.any()) == (step % 2 == 1)
        assert torch.equal(model[0].weight, start) == (step < 2)
    assert optimizer.state[model[0].up_NOr]["exp_avg"].any()


@needs_galore
@pytest.mark.parametrize("form", ["8-bit", "layer-wise"])
def test_other_forms_of_galore_update_like_its_authors_optimizer(form: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 200), nn.ReLU(), nn.Linear(200, 2))
    model = copy.deepcopy(reference)
    groups = galore_groups(model, lr=0.01, lr_other=0.002)
    reference_groups = galore_groups(reference, lr=0.01, lr_other=0.002)
    for group in (*groups, *reference_groups):
        group |= {"eps": 1e-12, **({"rank": 4} if "rank" in group else {})}  # they add eps to different forms of the root
    optimizer = (Galore8bit if form == "8-bit" else UpdateInBackward)(groups)
    reference_optimizer = galore(reference_groups)
    start = reference[0].weight.clone()
    for _ in range(3):
        input = torch.randn(5, 12)
        for each, update in ((model, optimizer), (reference, reference_optimizer)):
            each.zero_grad()
            each(input).square().mean().backward()
            update.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert not torch.equal(start, reference[0].weight)
    if form == "layer-wise":
        assert all(parameter.grad is None for parameter in model.parameters())
