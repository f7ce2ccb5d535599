"""The definition of `gathered_matmul` in plain torch: the oracle that every faster version is compared with.

U products; P, Q slices in the two operands; n1 x r times r x n2 each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor, p_ascends: bool = False) -> Tensor:
    """out[u] = a[p[u]] @ b[q[u]]: a [P, n1, r], b [Q, r, n2], p and q [U] -> [U, n1, n2]; zero where p[u] < 0."""
    out = torch.bmm(a.index_select(0, p.clamp(min=0)), b.index_select(0, q.clamp(min=0)))
    return out.masked_fill(p[:, None, None] < 0, 0)


def backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, p_ascends: bool = False) -> tuple[Tensor, Tensor]:
    """da[i] = sum over {u: p[u] = i} of grad[u] @ b[q[u]]^T, and db[j] = sum over {u: q[u] = j} of a[p[u]]^T @ grad[u]."""
    if not len(p):
        return a.new_zeros(a.shape), b.new_zeros(b.shape)
    grad = grad.masked_fill(p[:, None, None] < 0, 0)
    p, q = p.clamp(min=0), q.clamp(min=0)
    grad_a = a.new_zeros(a.shape).index_add_(0, p, torch.bmm(grad, b.index_select(0, q).mT))
    grad_b = b.new_zeros(b.shape).index_add_(0, q, torch.bmm(a.index_select(0, p).mT, grad))
    return grad_a, grad_b
