"""Checks of the arguments that all swaps share: sizes, the config, `init`, and the weights to start from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from comera_rec.tt import require_positive

INITS = ("random", "tt_svd")
COMPUTED_WEIGHT = "its weight is computed from other parameters, as weight_norm, spectral_norm and pruning do"


def require_one_size(tt_ranks: int | Sequence[int] | None, compression: float | None) -> None:
    """Raise ValueError unless at most one of the two is given, ranks are positive and the compression is above 1."""
    for rank in () if tt_ranks is None else tt_ranks if isinstance(tt_ranks, Sequence) else (tt_ranks,):
        require_positive(tt_ranks=rank)
    if tt_ranks is not None and compression is not None:
        raise ValueError(f"tt_ranks {tt_ranks} and compression {compression} are both given: give one of them")
    if compression is not None and not (isinstance(compression, int | float) and compression > 1):
        raise ValueError(f"compression is {compression!r}: give a number above 1, e.g. 100 for tables 100 times smaller")


def require_config(config: object, kind: type) -> None:
    """Raise TypeError unless a config is of this kind."""
    if not isinstance(config, kind):
        raise TypeError(f"config is {config!r}: give a {kind.__name__}, such as {kind.__name__}(compression=100)")


def require_init(init: str) -> None:
    """Raise ValueError unless `init` is one of `INITS`."""
    if init not in INITS:
        raise ValueError(f"init is {init!r}: choose one of {', '.join(map(repr, INITS))}")


def require_values(weight: Tensor, name: str) -> None:
    """Raise ValueError for a weight on the meta device, which TT-SVD can't start from."""
    if weight.is_meta:
        raise ValueError(f"{name!r} is on the meta device, without values to start from: swap with init='random'")
