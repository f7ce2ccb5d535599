"""The gate: nothing is timed until every provider's values agree with the reference."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Largest error relative to the largest reference value, by the dtype that a provider returns.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class Disagreement(Exception):
    """A provider's values differ from the reference."""


def require_agreement(reference: Mapping[str, Tensor], outcomes: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Compare what providers computed with the reference.

    Args:
        reference: quantity -> value, in float64: "output", and gradients or updated weights under their own names.
        outcomes: provider -> the quantities that it can show, always including "output".

    Raises:
        Disagreement: for values that differ, and for missing or unknown quantities; it names provider, quantity and error.
    """
    for provider, outcome in outcomes.items():
        if "output" not in outcome:
            raise Disagreement(f"{provider} shows no output")
        for quantity, value in outcome.items():
            if quantity not in reference:
                raise Disagreement(f"{provider} shows {quantity}, which the reference lacks")
            expected = reference[quantity]
            if value.shape != expected.shape:
                raise Disagreement(f"{provider}: {quantity} has shape {tuple(value.shape)}, not {tuple(expected.shape)}")
            error = float((value.double() - expected).abs().max()) if value.numel() else 0.0
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            if not error <= TOLERANCE[value.dtype] * largest:  # catches NaN too
                raise Disagreement(
                    f"{provider}: {quantity} is off by {error:.3g} where values reach {largest:.3g}"
                    f" (tolerance {TOLERANCE[value.dtype]:g} of that)"
                )
