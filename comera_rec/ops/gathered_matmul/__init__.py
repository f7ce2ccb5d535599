"""`gathered_matmul`: batched products of gathered slices, the one hot primitive of a tensor-train lookup.

Registered with torch.library, so that torch.compile and torch.export see one node with a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comera_rec.ops.gathered_matmul import reference

IMPLEMENTATIONS = {"reference": reference}


@torch.library.custom_op("comera_rec::gathered_matmul", mutates_args=())
def _forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # the result has the operands' dtype, as the fake kernel says
        return IMPLEMENTATIONS[impl].forward(a, b, p, q)


@_forward.register_fake
def _(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str) -> Tensor:
    return a.new_empty(p.shape[0], a.shape[1], b.shape[2])


@torch.library.custom_op("comera_rec::gathered_matmul_backward", mutates_args=())
def _backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    with torch.autocast(a.device.type, enabled=False):
        return IMPLEMENTATIONS[impl].backward(grad, a, b, p, q)


@_backward.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *operands, ctx.impl = inputs
    ctx.save_for_backward(*operands)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    grad_a, grad_b = _backward(grad.contiguous(), *ctx.saved_tensors, ctx.impl)
    return grad_a, grad_b, None, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)


def resolve_impl(impl: str) -> str:
    """The implementation that `impl` stands for on this machine ("auto" picks the fastest one there is).

    Raises:
        ValueError: for an implementation that does not exist.
    """
    if impl == "auto":
        return "reference"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: choose 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    return impl


def gathered_matmul(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str = "auto") -> Tensor:
    """Multiply gathered slices: out[u] = a[p[u]] @ b[q[u]].

    Gradients are sums over equal ids, da[i] = sum over {u: p[u] = i} of dout[u] @ b[q[u]]^T and db alike.
    Autocast leaves it alone, as it does `torch.nn.functional.embedding_bag`.

    Args:
        a: [P, n1, r].
        b: [Q, r, n2], of the dtype of `a`.
        p: [U] integer ids in [0, P).
        q: [U] integer ids in [0, Q).
        impl: "auto" or "reference".

    Returns:
        [U, n1, n2].

    Raises:
        ValueError: if the shapes do not fit together.
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[2] != b.shape[1] or p.shape != q.shape or p.dim() != 1:
        raise ValueError(
            f"gathered_matmul takes a [P, n1, r], b [Q, r, n2], p [U] and q [U], got {tuple(a.shape)}, {tuple(b.shape)}, "
            f"{tuple(p.shape)} and {tuple(q.shape)}"
        )
    out: Tensor = _forward(a, b, p, q, resolve_impl(impl))
    return out
