"""The transformer benchmark: providers agree, wrong gradients are caught, and training state is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.linear.transformer import DENSE, FULL, GALORES, LOW_RANK, LTE, OURS, QUICK, StepProvider, TransformerWorkload, build

CASE = QUICK[0]


@pytest.fixture
def workload() -> TransformerWorkload:
    return TransformerWorkload(CASE, "cpu", seed=0)


@pytest.mark.parametrize("name", [DENSE, *GALORES, LTE, LOW_RANK, OURS])
def test_providers_agree_with_the_reference(workload: TransformerWorkload, name: str) -> None:
    if name in workload.left_out:
        pytest.skip(workload.left_out[name])
    reference, shown = workload.reference(), workload.providers[name]().verify()
    require_agreement(reference, {name: shown})
    dropped = name == GALORES[2]
    assert ("gradient of 0.blocks.1.feed_forward.expand.bias" in shown) != dropped, "layer-wise GaLore drops gradients"
    if name == OURS:
        assert shown.keys() == reference.keys()


def test_a_core_with_a_wrong_gradient_is_found(workload: TransformerWorkload) -> None:
    reference, shown = workload.reference(), workload.providers[OURS]().verify()
    shown["gradient of 0.tokens.core_1"] *= 1.001
    with pytest.raises(Disagreement, match=r"gradient of 0.tokens.core_1 is off by"):
        require_agreement(reference, {OURS: shown})


@pytest.mark.parametrize("name", [DENSE, OURS])
def test_training_state_is_weights_gradients_and_two_moments(workload: TransformerWorkload, name: str) -> None:
    provider = workload.providers[name]()
    assert isinstance(provider, StepProvider)
    counted = workload.counted(provider, "step")
    weights = counted["params"] * 4 / 2**20
    steps = len(list(provider.module.parameters())) * 4 / 2**20  # Adam counts steps for each parameter
    assert counted["weights_mib"] == counted["gradients_mib"] == pytest.approx(weights)
    assert counted["optimizer_mib"] == pytest.approx(2 * weights + steps)
    assert counted["training_state_mib"] == pytest.approx(4 * weights + steps)


def test_each_form_of_galore_keeps_less_than_the_last(workload: TransformerWorkload) -> None:
    if workload.left_out:
        pytest.skip(str(workload.left_out))
    full, eight_bit, layerwise = (workload.counted(workload.providers[name](), "step") for name in GALORES)
    assert eight_bit["optimizer_mib"] < full["optimizer_mib"]
    assert layerwise["optimizer_mib"] == full["optimizer_mib"]
    assert layerwise["gradients_mib"] == 0 < full["gradients_mib"]


def test_lte_keeps_moments_only_of_its_heads(workload: TransformerWorkload) -> None:
    provider = workload.providers[LTE]()
    assert isinstance(provider, StepProvider)
    counted = workload.counted(provider, "step")
    trained = [p for p in provider.module.parameters() if p.requires_grad]
    assert sum(p.dim() == 3 for p in trained) == 2 * 13, "six layers in each of two encoders and one in the head"
    trained_mib = sum(p.numel() for p in trained) * 4 / 2**20
    assert counted["gradients_mib"] == pytest.approx(trained_mib)
    assert counted["optimizer_mib"] == pytest.approx(2 * trained_mib + len(trained) * 4 / 2**20)
    assert counted["weights_mib"] > trained_mib


def test_the_full_cases_are_the_papers_model() -> None:
    with torch.device("meta"):
        model = build(FULL[0])
    params = sum(parameter.numel() for parameter in model.parameters())
    assert [case.batch for case in FULL] == [1, 8]
    assert 66_660_098 / params > 43
