"""Growth of TT ranks, the reverse of truncation: the output stays the same.

a, b ranks before and after a core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn import TTModule, named_tt_modules
from comera_rec.rank.truncation import replace_parameter_, require_known_states, require_optimized
from comera_rec.tt import max_ranks

_SCALES = ("sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "step_size")
"""Optimizer state that sets the size of updates: second moments, and Rprop's steps."""


def grow_ranks_(
    model: nn.Module, ranks: Mapping[str, Sequence[int]], optimizer: Optimizer | None = None
) -> dict[str, tuple[int, ...]]:
    """Add ranks to TT modules in place; the model's output stays the same until it is trained further.

    New entries of a core are Gaussian, with the standard deviation of the old ones, where they lead into new ranks, and zero where
    they lead from new ranks to old ones: no path through a new rank reaches the output yet, but the gradient of its last core is
    not zero. New rank parameters are one. Momenta and gradients are padded with zeros; second moments (Adam's, Adagrad's) and
    Rprop's step sizes are padded with their mean, so that the first updates of new entries are no larger than those of old entries.
    A module that was truncated away starts at its initial scale.

    Args:
        model: any module that contains TT modules.
        ranks: fully qualified name -> new ranks of all bonds of that module, none smaller than now.
        optimizer: the optimizer of the model's parameters, if there is one; its state grows with them.

    Raises:
        ValueError: before anything is changed, for a name that is not a TT module, ranks that are smaller than now or larger than
            the modes can use, for an optimizer without parameters that would change, or with state of a shape that can't grow.

    Returns:
        The ranks of every TT module, by fully qualified name.
    """
    modules = dict(named_tt_modules(model))
    for name, new_ranks in ranks.items():
        if name not in modules:
            raise ValueError(f"ranks names {name!r}, which is not a TT module: choose from {', '.join(modules)}")
        shape = modules[name].shape
        limits = max_ranks(shape.row_shape, shape.col_shape)
        if (
            not isinstance(new_ranks, Sequence)
            or len(new_ranks) != len(limits)
            or any(not max(old, 1) <= new <= limit for old, new, limit in zip(shape.ranks, new_ranks, limits, strict=True))
        ):
            raise ValueError(
                f"ranks of {name!r} are {new_ranks}: it has {shape.ranks} and can use {limits}; give ranks between these"
            )
    if optimizer:
        require_optimized({name: modules[name] for name in ranks}, optimizer)
    require_known_states([modules[name] for name in ranks], optimizer)
    for name, new_ranks in ranks.items():
        _grow_(modules[name], tuple(new_ranks), optimizer)
    return {name: module.shape.ranks for name, module in modules.items()}


def _grow_(module: TTModule, ranks: tuple[int, ...], optimizer: Optimizer | None) -> None:
    before, shape = module.shape, module.shape.with_ranks(ranks)
    initial = ((module.std**2 or 1.0) / math.prod(ranks)) ** (1 / (2 * shape.order))  # as `init_cores_`
    for k, (core, size, old_b) in enumerate(zip(module.cores(), shape.core_shapes, before.bonds[1:], strict=True)):
        spread = float(core.detach().square().mean().sqrt()) if core.numel() else 0.0
        spread = spread or initial
        grown = partial(_padded, size=size, old_b=old_b, spread=spread)
        replace_parameter_(core, lambda tensor, key, k=k, grown=grown: module.laid_out(k, grown(tensor, key=key)), optimizer)
    for rank, length in zip(module.rank_parameters(), ranks, strict=True):
        replace_parameter_(rank, partial(_padded_rank, size=length), optimizer)
    module.shape = shape


def _filler(tensor: Tensor, key: str) -> float:
    return float(tensor.mean()) if key in _SCALES and tensor.numel() else 0.0


def _padded(tensor: Tensor, *, key: str, size: tuple[int, ...], old_b: int, spread: float) -> Tensor:
    old_a = tensor.shape[0]
    grown = tensor.new_full(size, _filler(tensor, key))
    if key == "data":
        grown[..., old_b:].normal_(0.0, spread)  # into new ranks; entries from new to old ranks stay zero
    grown[:old_a, :, :, :old_b] = tensor
    return grown


def _padded_rank(tensor: Tensor, *, key: str, size: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, size - len(tensor)), value=1.0 if key == "data" else _filler(tensor, key))
