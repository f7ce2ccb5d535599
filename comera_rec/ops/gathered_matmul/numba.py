"""`gathered_matmul` on CPU: tiles of vectors, compiled by Numba; nothing is gathered but into registers.

U products; P, Q slices in the two operands; n1 x r times r x n2 each. float32; other types are converted on the way in and out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from comera_rec.ops.simd.parallel import float32_at, int64_at, kernel, next_task
from comera_rec.ops.simd.tile import Products, numbers, sum_products

NUMBERS, ROWS, COLS = len(Products._fields), Products._fields.index("rows"), Products._fields.index("cols")
_TASKS = 128  # for all threads together: many enough to share evenly, few enough to cost nothing


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
    one_each = counting(U + 1)
    products = Products(
        c=out, c_slice=n1 * n2, a=plain(a), a_slice=n1 * r, a_row=r, a_col=1, b=plain(b), b_slice=r * n2,
        starts=one_each, xs=plain(p), ys=plain(q), zs=one_each, rows=n1, depth=r, cols=n2,
    )  # fmt: skip
    run(products)
    return out.to(a.dtype)


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
    left, right = sort_by((p, P, q), (q, Q, p))
    run(gradient_of_a(grad_a, grad, transposed(b), left.starts, left.order, left.others))
    run(gradient_of_b(grad_b_transposed, grad, a, right.starts, right.order, right.others))
    return grad_a.to(dtype), grad_b_transposed.to(dtype)


def gradient_of_a(out: Tensor, grad: Tensor, b_transposed: Tensor, starts: Tensor, rows: Tensor, q: Tensor) -> Products:
    """out[i] = sum over {t: starts[i] <= t < starts[i + 1]} of grad[rows[t]] @ b_transposed[q[t]]."""
    (P, n1, r), (_, n2, _) = out.shape, b_transposed.shape
    return Products(
        c=out, c_slice=n1 * r, a=grad, a_slice=n1 * n2, a_row=n2, a_col=1, b=b_transposed, b_slice=n2 * r,
        starts=starts, xs=rows, ys=q, zs=counting(P), rows=n1, depth=n2, cols=r,
    )  # fmt: skip


def gradient_of_b(out: Tensor, grad: Tensor, a: Tensor, starts: Tensor, rows: Tensor, p: Tensor) -> Products:
    """out[j] = sum over {t: starts[j] <= t < starts[j + 1]} of grad[rows[t]]^T @ a[p[t]]: transposed, as r fills vectors better."""
    (Q, n2, r), (_, n1, _) = out.shape, a.shape
    return Products(
        c=out, c_slice=n2 * r, a=grad, a_slice=n1 * n2, a_row=1, a_col=n2, b=a, b_slice=n1 * r,
        starts=starts, xs=rows, ys=p, zs=counting(Q), rows=n2, depth=n1, cols=r,
    )  # fmt: skip


_counts = torch.arange(1 << 10, device="cpu")


def counting(count: int) -> Tensor:
    """0, 1, 2, ..: the first `count` numbers, which calls share, on any thread."""
    global _counts
    counts = _counts  # another thread may put others in their place
    if len(counts) < count:
        counts = _counts = torch.arange(2 * count, device="cpu")
    return counts[:count]


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


def run(products: Products, firsts: np.ndarray | None = None) -> None:
    """Compute sums of products; of several kinds, if it is said which sum is the first of each, and how many there are."""
    firsts = np.array([0, len(products.starts) - 1]) if firsts is None else firsts
    bounds, of = shares(products.starts, firsts)
    _sum_products(len(of), bounds, of, numbers(products, len(firsts) - 1))


@kernel
def _sum_products(params):  # type: ignore[no-untyped-def]
    bounds, of = int64_at(params[2]), int64_at(params[3])
    task = next_task(params)
    while task < params[1]:
        products = int64_at(params[4] + 8 * NUMBERS * of[task])
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


def sort_by(*jobs: tuple[Tensor, int, Tensor]) -> list[Sorted]:
    """Per job: keys [U], how many there may be, and what goes with each."""
    found = [
        Sorted(torch.zeros(count + 1, dtype=torch.int64), *(torch.empty_like(keys) for _ in range(3))) for keys, count, _ in jobs
    ]
    params = [param for (keys, count, others), own in zip(jobs, found, strict=True) for param in (keys, others, count, *own)]
    _counting_sort(len(jobs), len(jobs[0][0]), *params)
    return found


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


def shares(starts: Tensor, firsts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Cut sums of several kinds, of which each begins at one of `firsts`, into tasks of about equal work.

    Work is a sum's products, from one of `starts` to the next, and one more for writing it.

    Returns:
        The first sum of each task and the last one's end; and the kind each is of.
    """
    bounds, of = _shares(starts.numpy(), firsts, _TASKS)
    return torch.from_numpy(bounds), torch.from_numpy(of)


@njit(nogil=True, cache=True)
def _shares(starts, firsts, tasks):  # type: ignore[no-untyped-def]
    kinds, last = len(firsts) - 1, firsts[-1]
    bounds, of = np.empty(tasks + kinds + 1, np.int64), np.empty(tasks + kinds, np.int64)
    total, task = max(1, starts[last] - starts[firsts[0]] + last - firsts[0]), 0
    for kind in range(kinds):
        first, beyond = firsts[kind], firsts[kind + 1]
        work = starts[beyond] - starts[first] + beyond - first
        count = min(beyond - first, max(1, work * tasks // total))
        s = first
        for number in range(count):
            bounds[task], of[task] = s, kind
            task += 1
            while s < beyond and (starts[s] - starts[first] + s - first) * count < work * (number + 1):
                s += 1
    bounds[task] = last
    return bounds[: task + 1], of[:task]
