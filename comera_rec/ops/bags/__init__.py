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


def pool_products(
    a: Tensor,
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
        a, b, p, q, impl: as in `gathered_matmul`, for the U unique rows of a plan; p ascends, as plans have it.
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
    impl = resolve_impl(impl, a.device, a.dtype)
    if impl == "numba" and mode != "max" and a.dtype == torch.float32 and num_cols == a.shape[1] * b.shape[2]:
        of_plan = (plan.inverse, plan.order, plan.starts)
        bags: Tensor = _pool_products(a, b, p, q, *of_plan, offsets.long(), per_sample_weights, mode == "mean", features)
        return bags
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


def _kernels() -> Any:
    return importlib.import_module(f"{__name__}.numba")  # late: whoever only imports the package need not wait for Numba


@torch.library.custom_op("comera_rec::pool_products", mutates_args=(), device_types="cpu")
def _pool_products(
    a: Tensor, b: Tensor, p: Tensor, q: Tensor, inverse: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
) -> Tensor:  # fmt: skip
    return _kernels().forward(a, b, p, q, inverse, order, starts, offsets, weights, mean, features)


@_pool_products.register_fake
def _(a, b, p, q, inverse, order, starts, offsets, weights, mean, features):  # type: ignore[no-untyped-def]
    return a.new_empty((offsets.shape[0] - 1) // features, features * a.shape[1] * b.shape[2])


@torch.library.custom_op("comera_rec::pool_products_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, order: Tensor, starts: Tensor,
    offsets: Tensor, weights: Tensor | None, mean: bool, features: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _kernels().backward(grad, a, b, p, q, order, starts, offsets, weights, mean, features)


@_backward.register_fake
def _(grad, a, b, p, q, order, starts, offsets, weights, mean, features):  # type: ignore[no-untyped-def]
    grad_b = b.new_empty(b.shape[0], b.shape[2], b.shape[1]).mT  # as it is computed; stack_cores takes it as it is
    return a.new_empty(a.shape), grad_b, a.new_empty(0 if weights is None else weights.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    a, b, p, q, _, order, starts, offsets, weights, ctx.mean, ctx.features = inputs
    ctx.save_for_backward(a, b, p, q, order, starts, offsets, weights)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    *saved, weights = ctx.saved_tensors
    grad_a, grad_b, grad_weights = _backward(grad, *saved, weights, ctx.mean, ctx.features)
    return grad_a, grad_b, *[None] * 6, None if weights is None else grad_weights, None, None


torch.library.register_autograd(_pool_products, _differentiate, setup_context=_setup_context)
