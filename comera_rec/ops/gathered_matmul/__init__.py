"""`gathered_matmul`: batched products of gathered slices, which form the halves of rows in a GPU lookup of three or four cores.

Registered with torch.library, so that torch.compile and torch.export see one node with a gradient. Its implementations are modules
beside this one, imported when first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "triton")


@torch.library.custom_op("comera_rec::gathered_matmul", mutates_args=())
def _forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str, p_ascends: bool) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # the result has the operands' dtype, as the fake kernel says
        return _implementation(impl).forward(a, b, p, q, p_ascends)


@_forward.register_fake
def _(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str, p_ascends: bool) -> Tensor:
    return a.new_empty(p.shape[0], a.shape[1], b.shape[2])


@torch.library.custom_op("comera_rec::gathered_matmul_backward", mutates_args=())
def _backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str, p_ascends: bool) -> tuple[Tensor, Tensor]:
    with torch.autocast(a.device.type, enabled=False):
        return _implementation(impl).backward(grad, a, b, p, q, p_ascends)


@_backward.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str, p_ascends: bool) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *operands, ctx.impl, ctx.p_ascends = inputs
    ctx.save_for_backward(*operands)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    grad_a, grad_b = _backward(grad.contiguous(), *ctx.saved_tensors, ctx.impl, ctx.p_ascends)
    return grad_a, grad_b, None, None, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)


def _implementation(impl: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{impl}")


def resolve_impl(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation to use; "auto" is the fastest one that exists for the device and type.

    Raises:
        ValueError: for an implementation that does not exist or can't run there.
    """
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl is {impl!r}: choose 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    has_triton = importlib.util.find_spec("triton") is not None
    if impl == "auto":
        return "triton" if has_triton and device.type == "cuda" and dtype != torch.float64 else "reference"
    if impl != "reference" and dtype == torch.float64:
        raise ValueError(f"impl is {impl!r}, which computes in float32: give float64 to 'reference'")
    if impl == "triton" and not has_triton:
        raise ValueError("impl is 'triton', but triton is not installed: install it (pip install triton) or choose 'auto'")
    if impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("impl is 'triton', which needs a GPU, but the tensors are on cpu: move them there or choose 'auto'")
    return impl


def gathered_matmul(a: Tensor, b: Tensor, p: Tensor, q: Tensor, impl: str = "auto", *, p_ascends: bool = False) -> Tensor:
    """Multiply gathered slices: out[u] = a[p[u]] @ b[q[u]].

    Gradients are sums over equal ids, da[i] = sum over {u: p[u] = i} of dout[u] @ b[q[u]]^T and db likewise, each in one order, so
    that results don't depend on the number of threads. Neither direction copies the slices that it gathers ("reference" does).
    Autocast leaves it alone, as it does `torch.nn.functional.embedding_bag`.

    Args:
        a: [P, n1, r].
        b: [Q, r, n2], of the dtype of `a`.
        p: [U] integer ids in [0, P); or -1, in both p and q, for a product that is left out: it is zero and has no gradient.
        q: [U] integer ids in [0, Q).
        impl: "auto", or "reference" (any device and type) or "triton" (GPU), which computes in float32.
        p_ascends: whether p ascends, with all of its -1 at the end, so that the gradient of `a` needs no sort. It isn't checked,
            and products that are left out may then be undefined instead of zero.

    Returns:
        [U, n1, n2].

    Raises:
        ValueError: if the shapes don't match, or the implementation can't run there.
        IndexError: for an id that is out of range (checked on CPU).
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[2] != b.shape[1] or p.shape != q.shape or p.dim() != 1:
        raise ValueError(
            f"gathered_matmul takes a [P, n1, r], b [Q, r, n2], p [U] and q [U], got {tuple(a.shape)}, {tuple(b.shape)}, "
            f"{tuple(p.shape)} and {tuple(q.shape)}"
        )
    out: Tensor = _forward(a, b, p, q, resolve_impl(impl, a.device, a.dtype), p_ascends)
    return out
