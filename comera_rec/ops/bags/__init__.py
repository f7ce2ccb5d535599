"""Bags of products: the last product of a lookup and the pooling of its rows, in one.

L ids in bags, U unique rows of N = n1 * n2 columns, F features of B bags each.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.gathered_matmul import gathered_matmul, resolve_impl
from comera_rec.ops.plan import LookupPlan

MODES = ("sum", "mean", "max")
ROW_BUFFER_BYTES = 256 << 20
"""On CPU, unique rows beyond this are made and pooled in several passes; bags of one id take no buffer in forward."""
SLICES_AT_ONCE = 4096
"""On CPU, the gradient of slices that are products themselves is made for at most so many at a time, and goes on to their operands
while it is in cache."""


def pool_products(
    a: Tensor | tuple[Tensor, Tensor, Tensor, Tensor],
    b: Tensor,
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
    """Pool bags of the rows a[p[u]] @ b[q[u]], as `torch.nn.functional.embedding_bag` would.

    On CPU, rows of bags of one id, as in Criteo's logs, go from cache to their places in the result and are stored nowhere else.

    Args:
        a, b, p, q, impl: as in `gathered_matmul`, for the U unique rows of a plan; p ascends, as plans have it. In place of `a` may
            stand what it is the product of, x [X, n, s], y [Y, s, m, r], i and j [P]: a[v] = x[i[v]] @ y[j[v]], n * m = n1.
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
    impl = resolve_impl(impl, b.device, b.dtype)
    height = a.shape[1] if isinstance(a, Tensor) else a[0].shape[1] * a[1].shape[2]
    if impl == "numba" and mode != "max" and b.dtype == torch.float32 and num_cols == height * b.shape[2]:
        # The gradient of slices that are products goes to their operands at once, and autograd knows nothing of the slices.
        factors = () if isinstance(a, Tensor) else a
        slices = a if isinstance(a, Tensor) else _slices(a[0].detach(), a[1].detach(), *a[2:], impl)
        of_plan = (plan.inverse, plan.order, plan.starts)
        bags: Tensor = _pool_products(
            slices, b, p, q, *of_plan, offsets.long(), per_sample_weights, mode == "mean", features, *factors
        )
        return bags
    a = a if isinstance(a, Tensor) else _slices(*a, impl)
    rows = gathered_matmul(a, b, p, q, impl).flatten(1)[:, :num_cols]
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


def _slices(x: Tensor, y: Tensor, i: Tensor, j: Tensor, impl: str) -> Tensor:
    """[P, n1, r]."""
    return gathered_matmul(x, y.flatten(2), i, j, impl).view(len(i), x.shape[1] * y.shape[2], y.shape[3])


def _kernels() -> Any:
    return importlib.import_module(f"{__name__}.numba")  # late: whoever only imports the package need not wait for Numba


@torch.library.custom_op("comera_rec::pool_products", mutates_args=(), device_types="cpu")
def _pool_products(
    a: Tensor, b: Tensor, p: Tensor, q: Tensor, inverse: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
    x: Tensor | None = None, y: Tensor | None = None, i: Tensor | None = None, j: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _kernels().forward(a, b, p, q, inverse, order, starts, offsets, weights, mean, features)


@_pool_products.register_fake
def _(a, b, p, q, inverse, order, starts, offsets, weights, mean, features, *factors):  # type: ignore[no-untyped-def]
    return a.new_empty((offsets.shape[0] - 1) // features, features * a.shape[1] * b.shape[2])


@torch.library.custom_op("comera_rec::pool_products_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
    x: Tensor | None = None, y: Tensor | None = None, i: Tensor | None = None, j: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _kernels().backward(grad, a, b, p, q, order, starts, offsets, weights, mean, features, x, y, i, j)


@_backward.register_fake
def _(grad, a, b, p, q, order, starts, offsets, weights, mean, features, x=None, y=None, *ij):  # type: ignore[no-untyped-def]
    # Transposed, as they are computed; stack_cores takes them as they are.
    grad_b = b.new_empty(b.shape[0], b.shape[2], b.shape[1]).mT
    grad_y = a.new_empty(0) if y is None else y.new_empty(y.shape[0], *y.shape[2:], y.shape[1]).movedim(3, 1)
    return a.new_empty((a if x is None else x).shape), grad_b, a.new_empty(0 if weights is None else weights.shape), grad_y


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    a, b, p, q, _, order, starts, offsets, weights, ctx.mean, ctx.features, *factors = inputs
    ctx.save_for_backward(a, b, p, q, order, starts, offsets, weights, *factors)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    *saved, weights, x, y, i, j = ctx.saved_tensors
    left, grad_b, grad_weights, grad_y = _backward(grad, *saved, weights, ctx.mean, ctx.features, x, y, i, j)
    grad_a, grad_x, grad_y = (left, None, None) if x is None else (None, left, grad_y)
    return grad_a, grad_b, *[None] * 6, None if weights is None else grad_weights, None, None, grad_x, grad_y, None, None


torch.library.register_autograd(_pool_products, _differentiate, setup_context=_setup_context)
