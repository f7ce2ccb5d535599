# ruff: noqa: N803, SIM102, SIM108 - Triton's convention: constants are in capitals, and branches on them are statements
# mypy: allow-untyped-defs
"""`gathered_matmul` on a GPU, in Triton.

U products, or rows; P, Q slices in the two operands; n1 x r times r x n2 each. Rows whose ids are negative are padding: their
products are 0. A segment is the rows of one slice.

Nothing here waits for the device, and shapes depend only on shapes, so that calls can be captured in a CUDA graph. Every sum has
a fixed order, so that results do not change from run to run.

Slices are so small (8 x 32 x 8) that loading operands costs more than multiplying them. Hence each warp takes several rows, and
`tl.dot` supplies register tiles. Its input_precision="ieee" is exact float32 on the ordinary multipliers; 16-bit operands are
widened to it, because tiles this small would leave tensor cores mostly idle. Sizes are compile-time constants, because loads are
vectors only where strides are known to be multiples of a vector; masks are used only where a size isn't a multiple of its block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comera_rec.ops.launch import LEAST_DOT, Launch, block, warps

CHUNK = 32
"""Rows of one program of `_sum_segments`: enough to reuse its accumulator, few enough to keep a GPU busy with 50,000 rows."""
_CHUNKS = 32  # parts that `_sum_parts` adds up at once


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    a_ptr, b_ptr, out_ptr, p_ptr, q_ptr, num_rows,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr, WIDE: tl.constexpr, ASCENDS: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """out[u] = a[p[u]] @ b[q[u]] for a block of rows and a tile of n1 x n2. If p ASCENDS, padding is at the end and not written."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_U
    if ASCENDS:
        if tl.load(p_ptr + start) < 0:
            return
    u = start + tl.arange(0, BLOCK_U)
    i = (tl.program_id(1) * BLOCK_1 + tl.arange(0, BLOCK_1))[None, :, None]
    j = (tl.program_id(2) * BLOCK_2 + tl.arange(0, BLOCK_2))[None, None, :]
    p = tl.load(p_ptr + u, mask=u < num_rows, other=-1)
    q = tl.load(q_ptr + u, mask=u < num_rows, other=-1)
    p = p.to(tl.int64) if WIDE else p.to(tl.int32)
    q = q.to(tl.int64) if WIDE else q.to(tl.int32)
    # Padding reads slice 0, which is there, so that loads need no masks for it.
    a_ptrs = a_ptr + (tl.maximum(p, 0)[:, None, None] * (N1 * R) + i * R)
    b_ptrs = b_ptr + (tl.maximum(q, 0)[:, None, None] * (R * N2) + j)
    out = tl.zeros([BLOCK_U, BLOCK_1, BLOCK_2], dtype=tl.float32)
    if R < BLOCK_R:  # shorter than any dot
        for k in tl.static_range(R):
            a = _load(a_ptrs + k, i < N1, N1 % BLOCK_1 == 0)
            b = _load(b_ptrs + k * N2, j < N2, N2 % BLOCK_2 == 0)
            out += a * b
    else:
        for start in tl.static_range(0, R, BLOCK_R):
            k = start + tl.arange(0, BLOCK_R)
            k_a, k_b = k[None, None, :], k[None, :, None]
            a = _load(a_ptrs + k_a, (i < N1) & (k_a < R), (N1 % BLOCK_1 == 0) and (R % BLOCK_R == 0))
            b = _load(b_ptrs + k_b * N2, (k_b < R) & (j < N2), (N2 % BLOCK_2 == 0) and (R % BLOCK_R == 0))
            out = tl.dot(a, b, out, input_precision="ieee", out_dtype=tl.float32)
    written = u < num_rows
    if ASCENDS:
        written = p >= 0
    else:
        out = tl.where((p >= 0)[:, None, None], out, 0.0)
    at = u[:, None, None] * (N1 * N2) + i * N2 + j
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=written[:, None, None] & (i < N1) & (j < N2))


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    if WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_sums"])
def _sum_segments(
    x_ptr, y_ptr, sums_ptr, parts_ptr, ids_ptr, order_ptr, other_ptr, num_rows, num_sums,
    X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
    FLIPPED: tl.constexpr, ORDERED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """sums[s] = sum over {n: ids[n] = s} of x[order[n]] @ y[other[order[n]]], for segments that lie within a chunk of sorted ids.

    A segment of several chunks leaves a part in each, for `_sum_parts`: in parts[chunk, 0] where it starts with the chunk, and in
    parts[chunk, 1] where it starts later. Sizes: x [X, Y], y [Y, Z], sums [X, Z]; x and sums are transposed if FLIPPED. Ids outside
    [0, num_sums) are padding and come last. If ORDERED, order[n] = n.
    """
    BLOCK: tl.constexpr = BLOCK_U * BLOCK_Y
    X_X: tl.constexpr = 1 if FLIPPED else Y
    X_Y: tl.constexpr = X if FLIPPED else 1
    SUM_X: tl.constexpr = 1 if FLIPPED else Z
    SUM_Z: tl.constexpr = X if FLIPPED else 1
    chunk = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]
    k = tl.program_id(2) * BLOCK_Z + tl.arange(0, BLOCK_Z)[None, :]
    step = tl.arange(0, BLOCK)  # runs over rows and, within each, over Y
    start = chunk * CHUNK
    rows = start + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1)
    end = start + tl.sum(((ids >= 0) & (ids < num_sums)).to(tl.int32))
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    after = tl.load(ids_ptr + end, mask=end < num_rows, other=-1)
    first = start
    while first < end:
        segment = tl.load(ids_ptr + first)
        last = first + tl.sum((ids == segment).to(tl.int32))
        total = tl.zeros([BLOCK_X, BLOCK_Z], dtype=tl.float32)
        for row in range(first, last, BLOCK_U):
            n = row + step // BLOCK_Y
            if ORDERED:
                u = n
            else:
                u = tl.load(order_ptr + n, mask=n < last, other=0).to(tl.int64)
            v = tl.load(other_ptr + u, mask=n < last, other=0).to(tl.int64)
            for start_y in tl.static_range(0, Y, BLOCK_Y):
                j = start_y + step % BLOCK_Y
                mask = (n < last) & (j < Y)
                x_at = (u * (X * Y) + j * X_Y)[None, :] + i * X_X
                y_at = (v * (Y * Z) + j * Z)[:, None] + k
                x = tl.load(x_ptr + x_at, mask=mask[None, :] & (i < X), other=0.0)
                y = tl.load(y_ptr + y_at, mask=mask[:, None] & (k < Z), other=0.0)
                total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision="ieee", out_dtype=tl.float32)
        inside = (i < X) & (k < Z)
        at = i * SUM_X + k * SUM_Z
        if ((first == start) & (before == segment)) | ((last == start + CHUNK) & (after == segment)):
            part = 2 * chunk + (first > start).to(tl.int32)
            tl.store(parts_ptr + part * (X * Z) + at, total, mask=inside)
        else:
            tl.store(sums_ptr + segment.to(tl.int64) * (X * Z) + at, total.to(sums_ptr.dtype.element_ty), mask=inside)
        first = last


@triton.jit(do_not_specialize=["num_rows", "num_sums", "size"])
def _sum_parts(
    sums_ptr, parts_ptr, ids_ptr, num_rows, num_sums, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """If a segment starts in this chunk and continues beyond it, add up its parts."""
    chunk = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = chunk * CHUNK
    end = start + CHUNK - 1
    # Triton's `&` evaluates both sides, so every load has a separate mask.
    segment = tl.load(ids_ptr + end + 1, mask=end + 1 < num_rows, other=-1)
    ending = tl.load(ids_ptr + end, mask=end < num_rows, other=-2)
    before = tl.load(ids_ptr + start - 1, mask=(start > 0) & (start < num_rows), other=-1)
    starting = tl.load(ids_ptr + start, mask=start < num_rows, other=-1)
    if (segment >= 0) & (segment < num_sums) & (before != segment) & (ending == segment):
        part = 2 * chunk + (starting != segment).to(tl.int32)
        total = tl.load(parts_ptr + part * size + element, mask=element < size, other=0.0)
        chunk += 1
        while tl.load(ids_ptr + chunk * CHUNK, mask=chunk * CHUNK < num_rows, other=-1) == segment:
            chunks = chunk + tl.arange(0, CHUNKS)
            ids = tl.load(ids_ptr + chunks * CHUNK, mask=chunks * CHUNK < num_rows, other=-1)
            at = (2 * chunks * size)[:, None] + element[None, :]
            parts = tl.load(parts_ptr + at, mask=(ids == segment)[:, None] & (element < size)[None, :], other=0.0)
            total += tl.sum(parts, 0)
            chunk += CHUNKS
        at = segment.to(tl.int64) * size + element
        tl.store(sums_ptr + at, total.to(sums_ptr.dtype.element_ty), mask=element < size)


def multiply_launch(num_rows: int, n1: int, rank: int, n2: int, *, ascends: bool, wide: bool = False) -> Launch:
    """Return the launch of `_multiply`; `wide` where an operand has 2^31 numbers or more."""
    block_1, block_2 = block(n1, 32), block(n2, 64)
    rows = max(1, min(16, 1024 // (block_1 * block_2)))
    return Launch(
        kernel=_multiply,
        grid=(triton.cdiv(num_rows, rows), triton.cdiv(n1, block_1), triton.cdiv(n2, block_2)),
        numbers={"num_rows": num_rows},
        constants={
            "N1": n1, "R": rank, "N2": n2, "WIDE": wide, "ASCENDS": ascends,
            "BLOCK_U": rows, "BLOCK_1": block_1, "BLOCK_R": LEAST_DOT, "BLOCK_2": block_2,
        },
        num_warps=warps(rows * block_1 * block_2),
    )  # fmt: skip


def segments_launch(num_rows: int, num_sums: int, size_x: int, size_y: int, size_z: int, *, flipped: bool, ordered: bool) -> Launch:
    """Return the launch of `_sum_segments`."""
    block_x, block_y, block_z = block(size_x, 32), block(size_y, 32), block(size_z, 32)
    return Launch(
        kernel=_sum_segments,
        grid=(triton.cdiv(num_rows, CHUNK), triton.cdiv(size_x, block_x), triton.cdiv(size_z, block_z)),
        numbers={"num_rows": num_rows, "num_sums": num_sums},
        constants={
            "X": size_x, "Y": size_y, "Z": size_z, "FLIPPED": flipped, "ORDERED": ordered,
            "CHUNK": CHUNK, "BLOCK_U": 32 // block_y, "BLOCK_X": block_x, "BLOCK_Y": block_y, "BLOCK_Z": block_z,
        },
        num_warps=warps(block_x * block_z),
    )  # fmt: skip


def parts_launch(num_rows: int, num_sums: int, size: int) -> Launch:
    """Return the launch of `_sum_parts`, which is compiled once for all sizes."""
    columns = 64
    return Launch(
        kernel=_sum_parts,
        grid=(triton.cdiv(num_rows, CHUNK), triton.cdiv(size, columns)),
        numbers={"num_rows": num_rows, "num_sums": num_sums, "size": size},
        constants={"CHUNK": CHUNK, "CHUNKS": _CHUNKS, "BLOCK": columns},
        num_warps=4,
    )


def forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor, p_ascends: bool = False) -> Tensor:
    """out[u] = a[p[u]] @ b[q[u]], or 0 where p[u] < 0: a [P, n1, r], b [Q, r, n2], p and q [U] -> [U, n1, n2].

    If p ascends, products with p[u] < 0 are not written.

    Raises:
        ValueError: for operands of a dtype other than float32, bfloat16 or float16.
    """
    (num_rows,), (_, n1, rank), n2 = p.shape, a.shape, b.shape[2]
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a is {a.dtype}: the GPU kernels compute in float32; give float64 to impl='reference'")
    out = a.new_empty(num_rows, n1, n2)
    if 0 in (out.numel(), a.numel(), b.numel()):
        return out.zero_()
    launch = multiply_launch(num_rows, n1, rank, n2, ascends=p_ascends, wide=max(a.numel(), b.numel()) >= 2**31)
    launch(a_ptr=a.contiguous(), b_ptr=b.contiguous(), out_ptr=out, p_ptr=p.contiguous(), q_ptr=q.contiguous())
    return out


def backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, p_ascends: bool = False) -> tuple[Tensor, Tensor]:
    """da[i] = sum over {u: p[u] = i} of grad[u] @ b[q[u]]^T, and db[j] = sum over {u: q[u] = j} of a[p[u]]^T @ grad[u].

    Besides the result it takes, for da, 8 U n1 r / CHUNK bytes for parts and a few words per row for the order; for db likewise.
    """
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    da, db = torch.zeros_like(a), torch.zeros_like(b)
    if 0 not in (grad.numel(), a.numel(), b.numel()):
        _sum_into(da, grad, b.mT.contiguous(), p.contiguous(), q.contiguous(), flipped=False, ascends=p_ascends)
        _sum_into(db, grad, a, q.contiguous(), p.contiguous(), flipped=True, ascends=False)
    return da, db


def _sum_into(sums: Tensor, x: Tensor, y: Tensor, ids: Tensor, other: Tensor, *, flipped: bool, ascends: bool) -> None:
    """sums[s] = sum over {u: ids[u] = s} of x[u] @ y[other[u]], x and sums transposed if `flipped`; `sums` is zero before."""
    num_sums, num_rows = len(sums), len(ids)
    order = ids  # not read where they ascend
    if not ascends:
        ids, order = torch.sort(_narrowed(ids, num_sums), stable=True)
    size_x, size_z = (sums.shape[2], sums.shape[1]) if flipped else (sums.shape[1], sums.shape[2])
    parts = torch.empty(2 * triton.cdiv(num_rows, CHUNK), size_x * size_z, dtype=torch.float32, device=x.device)
    segments_launch(num_rows, num_sums, size_x, y.shape[1], size_z, flipped=flipped, ordered=ascends)(
        x_ptr=x, y_ptr=y, sums_ptr=sums, parts_ptr=parts, ids_ptr=ids, order_ptr=order, other_ptr=other
    )
    parts_launch(num_rows, num_sums, size_x * size_z)(sums_ptr=sums, parts_ptr=parts, ids_ptr=ids)


def _narrowed(ids: Tensor, count: int) -> Tensor:
    """Return ids in the smallest type, because a radix sort takes one pass per byte; padding becomes `count`, to come last."""
    dtype = next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if count <= torch.iinfo(dtype).max)
    return torch.where(ids < 0, count, ids).to(dtype)
