"""Which linear layers of a model become TT layers, and those layers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from comera_rec.nn.linear import TTLinear
from comera_rec.nn.replacement import (
    FilterFn,
    keep_buffers_hooks_and_mode_,
    parameter_owners,
    reason_to_stay_dense,
    require_no_optimizer,
    require_values,
)
from comera_rec.tt import TTShape, dense_cost, require_positive, tt_cost
from data_pipeline.errors import UserError

_LEAST_SPEED_UP = 1.2
"""Least predicted speed-up at which a layer is compressed: predictions are off by up to a fifth."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinearCompression:
    """Settings of `comera_rec.compress_`: which linear layers become TT layers, and how small.

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
            raise UserError(f"policy is {self.policy!r}: choose 'auto' or 'always'")
        require_positive(batch=self.batch)

    def decide(self, in_features: int, out_features: int) -> "LinearDecision":
        """Decide whether a layer of this size is compressed, with the reason."""
        if min(in_features, out_features) < self.min_features:
            return LinearDecision(None, f"stays dense: fewer than {self.min_features} features on one side")
        shape = self._fitting_shape(in_features, out_features)
        if shape is None:
            return LinearDecision(None, f"stays dense: even rank 1 is not {self.compression:g} times smaller")
        ratio = in_features * out_features / shape.num_params
        speed_up = dense_cost(in_features, out_features, self.batch) / tt_cost(shape, self.batch)
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


def require_one_size(tt_ranks: int | Sequence[int] | None, compression: float | None) -> None:
    """Raise ValueError unless at most one of the two is given, ranks are positive and the compression is above 1."""
    for rank in () if tt_ranks is None else tt_ranks if isinstance(tt_ranks, Sequence) else (tt_ranks,):
        require_positive(tt_ranks=rank)
    if tt_ranks is not None and compression is not None:
        raise UserError(f"tt_ranks {tt_ranks} and compression {compression} are both given: give one of them")
    if compression is not None and not (isinstance(compression, int | float) and compression > 1):
        raise UserError(f"compression is {compression!r}: give a number above 1, e.g. 100 for tables 100 times smaller")


def compressed_linears(
    model: nn.Module, config: LinearCompression, *, filter_fn: FilterFn | None = None, init: str = "random"
) -> tuple[dict[nn.Module, nn.Module], dict[str, str]]:
    """Make the `TTLinear` layers that replace `nn.Linear` layers of a model.

    Returns:
        The layers, by those that they replace; and why the others stay dense, by name.
    """
    # Exact type: subclasses may be read by name and never called.
    linears = {
        module: name or "the model"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (filter_fn is None or filter_fn(module, name))
    }
    owners = parameter_owners(model)
    dense = {
        module: adapter_reason(model, name) or reason_to_stay_dense(module, owners, linears, init=init)
        for module, name in linears.items()
    }
    others = [module for module, reason in dense.items() if reason is None]
    replacements: dict[nn.Module, nn.Module] = {}
    layers: dict[Tensor, TTLinear] = {}  # by the weight that they replace
    reasons: dict[str, str] = {}
    for module, name in linears.items():
        decision = config.decide(module.in_features, module.out_features)
        # A layer that shares its weight with one that stays dense, does so too.
        if decision.shape is not None and (reason := dense[module] or reason_to_stay_dense(module, owners, others, init=init)):
            decision = LinearDecision(None, f"stays dense: {reason}")
        _LOGGER.info("%s: %d x %d, %s", name, module.in_features, module.out_features, decision.reason)
        if decision.shape is None:
            reasons[name] = decision.reason.removeprefix("stays dense: ")
            continue
        require_no_optimizer(module.weight, name)
        if init == "tt_svd":
            require_values(module.weight, name)
        layer = _compressed(module, decision.shape, init)
        if module.weight in layers:
            layer.tie_weight_(layers[module.weight])
        layers[module.weight] = replacements[module] = layer
    return replacements, reasons


def leave_fast_paths_(model: nn.Module) -> None:
    """Make torch's encoders call their TT layers in evaluation, too: its fast path reads the weights instead."""
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer)]
    for encoder in encoders:
        if any(isinstance(part, TTLinear) for part in encoder.modules()):
            if isinstance(encoder, nn.TransformerEncoder):
                encoder.use_nested_tensor = False
            else:
                encoder.activation_relu_or_gelu = 0  # neither of those that the fast path knows


def adapter_reason(model: nn.Module, name: str) -> str | None:
    """Return why a layer in an adapter of Hugging Face's PEFT stays dense, its own or the adapted one; None if it is in none."""
    path = name.split(".")
    around = (model.get_submodule(".".join(path[:length])) for length in range(len(path)))
    is_adapted = any(hasattr(module, "base_layer") and hasattr(module, "merge") for module in around)
    return "an adapter merges into its weight: compress first, then add adapters" if is_adapted else None


def _compressed(module: nn.Linear, shape: TTShape, init: str) -> TTLinear:
    layer = TTLinear.from_dense(module, shape=shape) if init == "tt_svd" else TTLinear.like(module, shape=shape)
    for parameter in (*layer.cores(), *layer.rank_parameters()):
        parameter.requires_grad_(module.weight.requires_grad)
    layer.bias = module.bias
    keep_buffers_hooks_and_mode_(layer, module)
    return layer
