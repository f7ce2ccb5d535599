"""The transformer benchmark: providers agree, wrong gradients are caught, and training state is counted."""

from __future__ import annotations

import pytest

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.transformer import DENSE, LOW_RANK, OURS, QUICK, StepProvider, TransformerWorkload


@pytest.fixture
def workload() -> TransformerWorkload:
    return TransformerWorkload(QUICK[0], "cpu", seed=0)


@pytest.mark.parametrize("name", [DENSE, LOW_RANK, OURS])
def test_providers_agree_with_the_reference_and_keep_two_moments(workload: TransformerWorkload, name: str) -> None:
    provider = workload.providers[name]()
    assert isinstance(provider, StepProvider)
    require_agreement(workload.reference(), {name: provider.verify()})
    counted = workload.counted(provider, "step")
    weights = counted["params"] * 4 / 2**20
    steps = len(list(provider.module.parameters())) * 4 / 2**20  # Adam counts steps for each parameter
    assert counted["weights_mib"] == counted["gradients_mib"] == pytest.approx(weights)
    assert counted["optimizer_mib"] == pytest.approx(2 * weights + steps)
    assert counted["training_state_mib"] == pytest.approx(4 * weights + steps)


def test_a_core_with_a_wrong_gradient_is_found(workload: TransformerWorkload) -> None:
    reference, shown = workload.reference(), workload.providers[OURS]().verify()
    assert shown.keys() == reference.keys()
    shown["gradient of 0.tokens.core_1"] *= 1.001
    with pytest.raises(Disagreement, match=r"gradient of 0.tokens.core_1 is off by"):
        require_agreement(reference, {OURS: shown})
