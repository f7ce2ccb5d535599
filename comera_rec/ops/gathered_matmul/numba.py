"""`gathered_matmul` on CPU: tiles of vectors, compiled by Numba; nothing is gathered but into registers.

U products; P, Q slices in the two operands; n1 x r times r x n2 each. float32; other types are converted on the way in and out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops.simd.parallel import address_of, float32_at, int64_at, kernel, next_task
from comera_rec.ops.simd.tile import Products, sum_products

ROWS, COLS = Products._fields.index("rows"), Products._fields.index("cols")
_TASKS = 64  # for all threads together: many enough to share evenly, few enough to cost nothing


def forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """out[u] = a[p[u]] @ b[q[u]]: a [P, n1, r], b [Q, r, n2], p and q [U] -> [U, n1, n2]; zero where p[u] < 0."""
    (P, n1, r), (Q, _, n2), U = a.shape, b.shape, len(p)
    out = torch.empty(U, n1, n2)
    if not (require_within(p, P, "p") and require_within(q, Q, "q") and out.numel() and r):
        out.zero_()
        kept = (p >= 0).nonzero()[:, 0]
        if len(kept) and out.numel() and r:
            if int(q[kept].min()) < 0:
                raise IndexError("q is negative where p is not: padding is -1 in both")
            out[kept] = forward(a.float(), b.float(), p[kept], q[kept])
        return out.to(a.dtype)
    one_each = torch.arange(U + 1)
    run(products_into(out, one_each * (n1 * n2), plain(a), plain(b), plain(p), plain(q), one_each))
    return out.to(a.dtype)


def products_into(out: Tensor, places: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, one_each: Tensor) -> Products:
    """As `forward`, but product u, n1 * n2 numbers, goes places[u] elements after the first of `out`; `one_each` is 0..U."""
    (_, n1, r), (_, _, n2) = a.shape, b.shape
    return Products(
        c=out, c_slice=1, a=a, a_slice=n1 * r, a_row=r, a_col=1, b=b, b_slice=r * n2,
        starts=one_each, xs=p, ys=q, zs=places, rows=n1, depth=r, cols=n2,
    )  # fmt: skip


def backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """da[i] = sum over {u: p[u] = i} of grad[u] @ b[q[u]]^T, and db[j] = sum over {u: q[u] = j} of a[p[u]]^T @ grad[u]."""
    if len(p) and int(p.min()) < 0:
        kept = (p >= 0).nonzero()[:, 0]
        grad, p, q = grad[kept], p[kept], q[kept]
    grad_a, grad_b_transposed = gradients(grad, a, b, p, q)
    return grad_a, transposed(grad_b_transposed.float()).to(b.dtype)


def gradients(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """As `backward`, but that of b is [Q, n2, r]; no padding."""
    (P, n1, r), (Q, _, n2) = a.shape, b.shape
    if not (len(p) and n1 and n2 and r):
        return a.new_zeros(a.shape), b.new_zeros(Q, n2, r)
    dtype, grad, a, b, p, q = a.dtype, plain(grad), plain(a), plain(b), plain(p), plain(q)
    grad_a, grad_b_transposed = torch.empty(P, n1, r), torch.empty(Q, n2, r)
    left, right = sort_both(p, P, q, Q)
    run(gradient_of_a(grad_a, grad, transposed(b), left.starts, left.order, left.others))
    run(gradient_of_b(grad_b_transposed, grad, a, right.starts, right.order, right.others))
    return grad_a.to(dtype), grad_b_transposed.to(dtype)


def gradient_of_a(out: Tensor, grad: Tensor, b_transposed: Tensor, starts: Tensor, rows: Tensor, q: Tensor) -> Products:
    """out[i] = sum over {t: starts[i] <= t < starts[i + 1]} of grad[rows[t]] @ b_transposed[q[t]]."""
    (P, n1, r), (_, n2, _) = out.shape, b_transposed.shape
    return Products(
        c=out, c_slice=n1 * r, a=grad, a_slice=n1 * n2, a_row=n2, a_col=1, b=b_transposed, b_slice=n2 * r,
        starts=starts, xs=rows, ys=q, zs=torch.arange(P), rows=n1, depth=n2, cols=r,
    )  # fmt: skip


def gradient_of_b(out: Tensor, grad: Tensor, a: Tensor, starts: Tensor, rows: Tensor, p: Tensor) -> Products:
    """out[j] = sum over {t: starts[j] <= t < starts[j + 1]} of grad[rows[t]]^T @ a[p[t]]: transposed, as r fills vectors better."""
    (Q, n2, r), (_, n1, _) = out.shape, a.shape
    return Products(
        c=out, c_slice=n2 * r, a=grad, a_slice=n1 * n2, a_row=1, a_col=n2, b=a, b_slice=n1 * r,
        starts=starts, xs=rows, ys=p, zs=torch.arange(Q), rows=n2, depth=n1, cols=r,
    )  # fmt: skip


def plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).contiguous()


def require_within(ids: Tensor, count: int, name: str) -> bool:
    """Whether no id is negative; an id that is too large is an IndexError."""
    if not len(ids):
        return False
    first, last = (int(extreme) for extreme in ids.aminmax())
    if last >= count:
        raise IndexError(f"{name} holds {last}, but there are {count} slices")
    return first >= 0


def run(products: Products) -> None:
    """Compute sums of products."""
    bounds = torch.empty(_TASKS + 1, dtype=torch.int64)
    split(products.starts.numpy(), bounds.numpy())
    _sum_products(_TASKS, bounds, *products)


@kernel
def _sum_products(params):  # type: ignore[no-untyped-def]
    bounds, products = int64_at(params[2]), int64_at(address_of(params) + 24)
    task = next_task(params)
    while task < params[1]:
        sum_products(products, bounds[task], bounds[task + 1], products[ROWS], products[COLS])
        task = next_task(params)


def transposed(b: Tensor) -> Tensor:
    """[Q, r, n2] -> [Q, n2, r]; torch's own copy takes several times as long for slices so small."""
    out = torch.empty(b.shape[0], b.shape[2], b.shape[1])
    _transpose(_TASKS, out, b, *b.shape)
    return out


@kernel
def _transpose(params):  # type: ignore[no-untyped-def]
    slices, rows, cols = params[4], params[5], params[6]
    out = carray(float32_at(params[2]), (slices, cols, rows))
    b = carray(float32_at(params[3]), (slices, rows, cols))
    task = next_task(params)
    while task < params[1]:
        for i in range(slices * task // params[1], slices * (task + 1) // params[1]):
            for k in range(rows):
                for j in range(cols):
                    out[i, j, k] = b[i, k, j]
        task = next_task(params)


class Sorted(NamedTuple):
    """U keys in ascending, stable order."""

    starts: Tensor
    """[keys + 1]: where the run of each key starts."""
    order: Tensor
    """[U]: which key comes next."""
    places: Tensor
    """[U]: where each key comes."""
    others: Tensor
    """[U]: what goes with the key that comes next."""


def sort_both(p: Tensor, p_count: int, q: Tensor, q_count: int) -> tuple[Sorted, Sorted]:
    """By p, with q; and by q, with p."""
    left, right = (Sorted(torch.zeros(n + 1, dtype=torch.int64), *map(torch.empty_like, [p] * 3)) for n in (p_count, q_count))
    _counting_sort(2, len(p), p, q, p_count, *left, q, p, q_count, *right)
    return left, right


@kernel
def _counting_sort(params):  # type: ignore[no-untyped-def]
    task = next_task(params)
    while task < params[1]:
        first = 3 + 7 * task
        keys, values, count = int64_at(params[first]), int64_at(params[first + 1]), params[first + 2]
        starts, order = int64_at(params[first + 3]), int64_at(params[first + 4])
        places, ordered = int64_at(params[first + 5]), int64_at(params[first + 6])
        for u in range(params[2]):
            starts[keys[u] + 1] += 1
        for key in range(count):
            starts[key + 1] += starts[key]
        # starts[key] moves to the end of its run, which is the start of the next one.
        for u in range(params[2]):
            t = starts[keys[u]]
            starts[keys[u]] = t + 1
            order[t] = u
            places[u] = t
            ordered[t] = values[u]
        for key in range(count, 0, -1):
            starts[key] = starts[key - 1]
        starts[0] = 0
        task = next_task(params)


@njit(nogil=True, cache=True)
def split(starts, bounds):  # type: ignore[no-untyped-def]
    """Cut the sums into tasks of equal work: products, and one more for writing each sum."""
    count, tasks, first = len(starts) - 1, len(bounds) - 1, starts[0]
    s = 0
    for task in range(tasks):
        while s < count and (starts[s] - first + s) * tasks < (starts[count] - first + count) * task:
            s += 1
        bounds[task] = s
    bounds[tasks] = count
