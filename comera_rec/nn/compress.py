"""Replacement of the linear layers of any model by TT layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from comera_rec.nn.checks import COMPUTED_WEIGHT, require_config, require_init, require_one_size, require_values
from comera_rec.nn.linear import TTLinear
from comera_rec.nn.tt_module import keep_buffers_hooks_and_mode_, parameter_owners, replace_modules_
from comera_rec.tt import TTShape, dense_milliseconds, require_positive, tt_milliseconds

_LEAST_SPEED_UP = 1.2
"""Least predicted speed-up at which a layer is compressed: predictions are off by up to a fifth."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TTLinearConfig:
    """Settings of `compress_linears_`: which linear layers become TT layers, and how small.

    Attributes:
        tt_ranks: one rank for all bonds, or one for each. Give at most one of `tt_ranks` and `compression`; default rank 16.
        compression: least ratio of dense weights to TT parameters of each layer. Ranks are the largest that reach it; a layer too
            small to reach it stays dense.
        order: number of cores, 2, 4, 6 or 8. Default 4, or one more than `tt_ranks` has entries.
        min_features: layers with fewer input or output features stay dense.
        policy: "auto" compresses a layer only if it gets smaller and its training steps are predicted to be faster; "always"
            compresses it wherever ranks fit.
        batch: input rows of a layer in a step (in a transformer: sequences times their length), for policy "auto". The prediction
            is for CPUs; on GPUs small layers gain less, because launches take longer than their products.

    Raises:
        ValueError: for values out of range, or both `tt_ranks` and `compression`.
    """

    tt_ranks: int | tuple[int, ...] | None = None
    compression: float | None = None
    order: int | None = None
    min_features: int = 128
    policy: str = "auto"
    batch: int = 4096

    def __post_init__(self) -> None:
        require_one_size(self.tt_ranks, self.compression)
        if self.policy not in ("auto", "always"):
            raise ValueError(f"policy is {self.policy!r}: choose 'auto' or 'always'")
        require_positive(batch=self.batch)

    def shape_for(self, in_features: int, out_features: int) -> TTShape | None:
        """Return the modes and ranks of a layer of this size, or None if it stays dense."""
        return self.decide(in_features, out_features).shape

    def decide(self, in_features: int, out_features: int) -> LinearDecision:
        """Decide whether a layer of this size is compressed, with the reason."""
        if min(in_features, out_features) < self.min_features:
            return LinearDecision(None, f"stays dense: fewer than {self.min_features} features on one side")
        shape = self._fitting_shape(in_features, out_features)
        if shape is None:
            return LinearDecision(None, f"stays dense: even rank 1 is not {self.compression:g} times smaller")
        ratio = in_features * out_features / shape.num_params
        speed_up = dense_milliseconds(in_features, out_features, self.batch) / tt_milliseconds(shape, self.batch)
        size = f"{ratio:.1f}x smaller" if ratio > 1 else "not smaller"
        reason = f"ranks {shape.ranks}, {size}, predicted {speed_up:.2f}x as fast at batch {self.batch}"
        if self.policy == "auto" and (ratio <= 1 or speed_up < _LEAST_SPEED_UP):
            return LinearDecision(None, f"stays dense: {reason}" + f", less than {_LEAST_SPEED_UP}x" * (ratio > 1))
        return LinearDecision(shape, reason)

    def _fitting_shape(self, in_features: int, out_features: int) -> TTShape | None:
        if self.compression is None:
            return TTShape.for_linear(in_features, out_features, tt_ranks=self.tt_ranks, order=self.order)
        order = self.order or 4
        budget = int(in_features * out_features / self.compression)
        if TTShape.for_linear(in_features, out_features, tt_ranks=1, order=order).num_params > budget:
            return None
        return TTShape.for_linear(in_features, out_features, order=order, budget_params=budget)


class LinearDecision(NamedTuple):
    """Modes and ranks of a layer, or None if it stays dense; and the reason in one line."""

    shape: TTShape | None
    reason: str


def compress_linears_(
    model: nn.Module, config: TTLinearConfig, *, filter_fn: Callable[[nn.Module, str], bool] | None = None, init: str = "random"
) -> nn.Module:
    """Replace the large `nn.Linear` layers of a model by `TTLinear`, in place.

    Build the optimizer afterwards, because the new layers have new parameters. The decision on each layer and its reason are logged
    at level INFO; `TTLinearConfig.decide` gives them beforehand.

    Frozen weights and biases stay frozen. Layers that shared a weight share cores and rank parameters afterwards. A weight stays
    dense if a layer that stays dense shares it, or another kind of module, such as an embedding.

    Layers of `torch.nn.MultiheadAttention` stay dense: its input projection is a bare parameter, and its output projection is a
    subclass of `nn.Linear` whose weight is read while the layer is never called. Attention that calls its layers, such as BERT's in
    the transformers library, is compressed.

    Args:
        model: any module.
        config: which layers, and how small.
        filter_fn: (module, fully qualified name) -> whether to consider the layer; default all.
        init: "random", or "tt_svd" to start from the layer's weights.

    Raises:
        ValueError: if no layer matched.

    Returns:
        The model; or the new layer, if the model itself is a linear layer.
    """
    require_config(config, TTLinearConfig)
    require_init(init)
    # Exact type: subclasses may be read by name and never called.
    linears = {
        module: name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (filter_fn is None or filter_fn(module, name))
    }
    owners = parameter_owners(model)
    replacements: dict[nn.Module, nn.Module] = {}
    layers: dict[torch.Tensor, TTLinear] = {}  # by the weight that they replace
    for module, name in linears.items():
        decision = config.decide(module.in_features, module.out_features)
        others = [(owner, each) for owner, each in owners.get(module.weight, ()) if each not in linears]
        if decision.shape is not None and (reason := _reason_to_stay_dense(module, others)):
            decision = LinearDecision(None, f"stays dense: {reason}")
        _LOGGER.info("%s: %d x %d, %s", name or "the model", module.in_features, module.out_features, decision.reason)
        if decision.shape is not None:
            if init == "tt_svd":
                require_values(module.weight, name)
            layer = _compressed(module, decision.shape, init)
            if module.bias is not None and len(owners.get(module.bias, ())) > 1:
                layer.bias = module.bias
            if module.weight in layers:
                layer.tie_weight_(layers[module.weight])
            layers[module.weight] = replacements[module] = layer
    if not replacements:
        raise ValueError(
            f"no linear layer was compressed: none that passes filter_fn has at least {config.min_features} features on both sides"
            f"{' and gains under policy auto' if config.policy == 'auto' else ''}; lower min_features or the ranks, "
            "or see the reasons in the log at level INFO"
        )
    return replace_modules_(model, replacements)


def _reason_to_stay_dense(module: nn.Linear, others: Sequence[tuple[str, nn.Module]]) -> str | None:
    if "weight" not in module._parameters:
        return COMPUTED_WEIGHT
    return next(
        (f"its weight is also that of {owner!r} ({type(other).__name__}), which is not compressed" for owner, other in others), None
    )


def _compressed(module: nn.Linear, shape: TTShape, init: str) -> TTLinear:
    layer = TTLinear.from_dense(module, shape=shape) if init == "tt_svd" else TTLinear.like(module, shape=shape)
    for parameter in (*layer.cores(), *layer.rank_parameters()):
        parameter.requires_grad_(module.weight.requires_grad)
    if layer.bias is not None:
        layer.bias.requires_grad_(module.bias.requires_grad)
    keep_buffers_hooks_and_mode_(layer, module)
    return layer
