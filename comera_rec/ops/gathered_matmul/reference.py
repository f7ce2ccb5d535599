"""The definition of `gathered_matmul` in plain torch: the oracle that every faster version is compared with.

U products; P, Q slices in the two operands; n1 x r times r x n2 each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """out[u] = a[p[u]] @ b[q[u]]: a [P, n1, r], b [Q, r, n2], p and q [U] -> [U, n1, n2]."""
    return torch.bmm(a.index_select(0, p), b.index_select(0, q))


def backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """da[i] = sum over {u: p[u] = i} of grad[u] @ b[q[u]]^T, and db[j] = sum over {u: q[u] = j} of a[p[u]]^T @ grad[u]."""
    grad_a = torch.zeros_like(a).index_add_(0, p, torch.bmm(grad, b.index_select(0, q).mT))
    grad_b = torch.zeros_like(b).index_add_(0, q, torch.bmm(a.index_select(0, p).mT, grad))
    return grad_a, grad_b
