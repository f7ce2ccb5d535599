"""Bags of products: the last product of a lookup and the pooling of its rows, in one.

L ids in bags, U unique rows of N = n1 * n2 columns, F features of B bags each.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.gathered_matmul import gathered_matmul, resolve_impl
from comera_rec.ops.plan import LookupPlan
from comera_rec.ops.stack import stack_cores

MODES = ("sum", "mean", "max")
ROW_BUFFER_BYTES = 256 << 20
"""On CPU, unique rows beyond this are made and pooled in several passes; bags of one id take no buffer in forward."""
SLICES_AT_ONCE = 4096
"""On CPU, the gradient of slices that are products themselves is made for at most so many at a time, and goes on to their operands
while it is in cache."""


class Factors(NamedTuple):
    """What a core's slices are products of: x[i[v]] @ y[j[v]], of n1 = n * m rows."""

    x: Tensor
    """[X, n, s]"""
    y: Tensor
    """[Y, s, m, r]"""
    i: Tensor
    """[P]"""
    j: Tensor
    """[P]"""

    def slices(self, impl: str) -> Tensor:
        """[P, n1, r]."""
        products = gathered_matmul(self.x, self.y.flatten(2), self.i, self.j, impl)
        return products.view(len(self.i), self.x.shape[1] * self.y.shape[2], self.y.shape[3])


def pool_products(
    a: Sequence[Tensor] | Factors,
    b: Sequence[Tensor],
    ranks: Sequence[Tensor],
    p: Tensor,
    q: Tensor,
    plan: LookupPlan,
    offsets: Tensor,
    *,
    num_cols: int,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    features: int = 1,
    impl: str = "auto",
) -> Tensor:
    """Pool bags of the rows a[:, p[u]] diag(D) b[:, q[u]], as `torch.nn.functional.embedding_bag` would.

    On CPU, rows of bags of one id, as in Criteo's logs, go from cache to their places in the result and are stored nowhere else.

    Args:
        a: per table a core (1, P_t, n1, r_t), whose slices p counts over all tables; or, of one table, what it is the product of.
        b: per table a core (r_t, Q_t, n2, 1); slices are counted by q.
        ranks: per table the diagonal D (r_t); none at all stand for ones.
        p, q, impl: as in `gathered_matmul`, for the U unique rows of a plan; p ascends, as plans have it.
        plan: the lookup's plan.
        offsets: [F*B + 1] starts of the bags, feature after feature, and the end of the last.
        num_cols: columns of a row, at most n1 * n2; what lies beyond is left out.
        mode: "sum", "mean" or "max".
        per_sample_weights: [L], of the dtype of `a`; mode "sum" only.
        features: F.

    Returns:
        [B, F * num_cols]: a sample's bags side by side.

    Raises:
        ValueError: for offsets that don't ascend from 0 to at most L (checked on CPU); for weights that aren't one for each id.
        NotImplementedError: for weights in another mode than "sum", as in torch.
    """
    if per_sample_weights is not None and mode != "sum":
        raise NotImplementedError(f"per_sample_weights only go with mode 'sum', not {mode!r}: drop them or change the mode")
    if per_sample_weights is not None and per_sample_weights.shape != plan.inverse.shape:
        raise ValueError(f"there are {len(per_sample_weights)} per_sample_weights for {len(plan.inverse)} ids: give one for each")
    first = b[0]
    impl = resolve_impl(impl, first.device, first.dtype)
    height = a.x.shape[1] * a.y.shape[2] if isinstance(a, Factors) else a[0].shape[2]
    is_whole = num_cols == height * first.shape[2]
    if impl == "numba" and mode != "max" and first.dtype == torch.float32 and is_whole and not torch.compiler.is_compiling():
        lookup = (p, q, plan, offsets.long(), mode == "mean", features)
        counts = (len(a), len(b), len(ranks))
        bags: Tensor = _PoolProducts.apply(lookup, isinstance(a, Factors), counts, per_sample_weights, *a, *b, *ranks)
        return bags
    slices = a.slices(impl) if isinstance(a, Factors) else stack_cores(a).flatten(1, 2)
    rows = gathered_matmul(slices, stack_cores(b, ranks or None).flatten(2), p, q, impl).flatten(1)[:, :num_cols]
    return pool_rows(rows, plan, offsets, mode=mode, per_sample_weights=per_sample_weights, features=features)


def pool_rows(
    rows: Tensor, plan: LookupPlan, offsets: Tensor, *, mode: str, per_sample_weights: Tensor | None = None, features: int = 1
) -> Tensor:
    """The pooling alone, in plain torch: rows [U, N] of a plan -> [B, F * N]; arguments as in `pool_products`."""
    count = len(plan.inverse)
    # Torch takes the last bag to go on to the last id, whatever its offset says; so one more bag takes what is in none.
    offsets = torch.cat([offsets.long(), plan.inverse.new_full((1,), count)])
    can_look = offsets.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_look and (len(offsets) == 1 or int(offsets[0]) or bool((offsets.diff() < 0).any())):
        raise ValueError(f"offsets must ascend from 0 to at most {count}, the number of ids")
    bags = F.embedding_bag(plan.inverse, rows, offsets, mode=mode, per_sample_weights=per_sample_weights, include_last_offset=True)
    return bags[:-1].unflatten(0, (features, -1)).transpose(0, 1).flatten(1)


def _kernels() -> Any:
    return importlib.import_module(f"{__name__}.numba")  # late: whoever only imports the package need not wait for Numba


class _PoolProducts(torch.autograd.Function):
    """The same on CPU, compiled. Tensors are a, b and ranks, so many of each."""

    @staticmethod
    def forward(ctx, lookup, nested: bool, counts, weights, *tensors) -> Tensor:  # type: ignore[no-untyped-def]
        left, b, ranks = _split(tensors, counts)
        # The gradient of slices that are products goes to their operands at once, and autograd knows nothing of the slices.
        a = (Factors(*left).slices("numba")[None],) if nested else left
        p, q, plan, offsets, mean, features = lookup
        batch = _kernels().lookups(p, q, plan, offsets, features, a[0].shape[2] * b[0].shape[2])
        ctx.mean, ctx.nested, ctx.counts = mean, nested, counts
        ctx.save_for_backward(weights, *batch, *(a if nested else ()), *tensors)
        return _kernels().forward(a, b, ranks, batch, plan.inverse, weights, mean, features)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        (weights, *batch), tensors = ctx.saved_tensors[:7], list(ctx.saved_tensors[7:])
        a = [tensors.pop(0)] if ctx.nested else tensors[: ctx.counts[0]]
        left, b, ranks = _split(tensors, ctx.counts)
        factors = left if ctx.nested else ()
        found, grad_weights = _kernels().backward(grad, a, b, ranks, _kernels().Lookups(*batch), weights, ctx.mean, factors)
        if ctx.nested:
            found[2:2] = [None, None]
        return None, None, None, None if weights is None else grad_weights, *found


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    left = iter(tensors)
    return [[next(left) for _ in range(count)] for count in counts]
