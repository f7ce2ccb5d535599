# ruff: noqa: N803 - Triton's custom: constants are in capitals
# mypy: allow-untyped-defs
"""`gathered_matmul` on a GPU, in Triton.

U products, or rows; P, Q slices in the two operands; n1 x r times r x n2 each. Rows whose ids are negative are padding: their
products are 0. A segment is the rows of one slice.

Nothing here waits for the device, and shapes follow from shapes alone, so that calls can be captured in a CUDA graph. Every sum has
a fixed order, so that results do not change from run to run.

Slices are so small (8 x 32 x 8) that bringing operands to the multipliers costs more than multiplying. Hence many rows a program,
and register tiles, which `tl.dot` brings. Its input_precision="ieee" is exact float32 on the ordinary multipliers; 16-bit operands
are widened to it, because tiles this small would leave tensor cores idle mostly. Sizes are compile-time constants, because loads
are vectors only where strides are known to be multiples of a vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""Rows of one program of `_sum_segments`: enough to reuse its accumulator, few enough to keep a GPU busy with 50,000 rows."""


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    a_ptr, b_ptr, out_ptr, p_ptr, q_ptr, num_rows,
    N1: tl.constexpr, R: tl.constexpr, N2: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """out[u] = a[p[u]] @ b[q[u]] for a block of rows and a tile of n1 x n2."""
    TILES_2: tl.constexpr = (N2 + BLOCK_2 - 1) // BLOCK_2
    TILES: tl.constexpr = (N1 + BLOCK_1 - 1) // BLOCK_1 * TILES_2
    block = tl.program_id(0).to(tl.int64) // TILES
    tile = tl.program_id(0) % TILES
    u = block * BLOCK_U + tl.arange(0, BLOCK_U)
    i = (tile // TILES_2 * BLOCK_1 + tl.arange(0, BLOCK_1))[None, :, None]
    j = (tile % TILES_2 * BLOCK_2 + tl.arange(0, BLOCK_2))[None, None, :]
    p = tl.load(p_ptr + u, mask=u < num_rows, other=-1).to(tl.int64)[:, None, None]
    q = tl.load(q_ptr + u, mask=u < num_rows, other=-1).to(tl.int64)[:, None, None]
    out = tl.zeros([BLOCK_U, BLOCK_1, BLOCK_2], dtype=tl.float32)
    if tl.max(p) >= 0:
        for start in range(0, R, BLOCK_R):
            k = start + tl.arange(0, BLOCK_R)
            k_a, k_b = k[None, None, :], k[None, :, None]
            a = tl.load(a_ptr + p * (N1 * R) + i * R + k_a, mask=(p >= 0) & (i < N1) & (k_a < R), other=0.0)
            b = tl.load(b_ptr + q * (R * N2) + k_b * N2 + j, mask=(p >= 0) & (k_b < R) & (j < N2), other=0.0)
            out = tl.dot(a.to(tl.float32), b.to(tl.float32), out, input_precision="ieee", out_dtype=tl.float32)
    u = u[:, None, None]
    tl.store(out_ptr + u * (N1 * N2) + i * N2 + j, out.to(out_ptr.dtype.element_ty), mask=(u < num_rows) & (i < N1) & (j < N2))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_segments(
    x_ptr, y_ptr, sums_ptr, parts_ptr, ids_ptr, order_ptr, other_ptr, num_rows,
    X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
    X_X: tl.constexpr, X_Y: tl.constexpr, Y_Y: tl.constexpr, Y_Z: tl.constexpr, SUM_X: tl.constexpr, SUM_Z: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """sums[s] = sum over {n: ids[n] = s} of x[order[n]] @ y[other[n]], as far as segments lie within one chunk of the sorted ids.

    A segment of several chunks leaves a part in each, for `_sum_parts`: in parts[chunk, 0] where it starts with the chunk, and in
    parts[chunk, 1] where it starts later. Sizes: x [X, Y], y [Y, Z], sums [X, Z]; X_Y is the stride of x along Y, and so forth.
    """
    TILES_Z: tl.constexpr = (Z + BLOCK_Z - 1) // BLOCK_Z
    TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X * TILES_Z
    BLOCK: tl.constexpr = BLOCK_U * BLOCK_Y
    chunk = tl.program_id(0).to(tl.int64) // TILES
    tile = tl.program_id(0) % TILES
    i = tile // TILES_Z * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]
    k = tile % TILES_Z * BLOCK_Z + tl.arange(0, BLOCK_Z)[None, :]
    step = tl.arange(0, BLOCK)  # runs over rows and, within each, over Y
    start = chunk * CHUNK
    end = tl.minimum(start + CHUNK, num_rows)
    rows = start + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=0)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    after = tl.load(ids_ptr + end, mask=end < num_rows, other=-1)
    first = start + tl.sum(((ids < 0) & (rows < num_rows)).to(tl.int32))  # padding comes first
    while first < end:
        segment = tl.load(ids_ptr + first)
        last = first + tl.sum(((ids == segment) & (rows < num_rows)).to(tl.int32))
        total = tl.zeros([BLOCK_X, BLOCK_Z], dtype=tl.float32)
        for row in range(first, last, BLOCK_U):
            n = row + step // BLOCK_Y
            u = tl.load(order_ptr + n, mask=n < last, other=0).to(tl.int64)
            v = tl.load(other_ptr + n, mask=n < last, other=0).to(tl.int64)
            for start_y in range(0, Y, BLOCK_Y):
                j = start_y + step % BLOCK_Y
                mask = (n < last) & (j < Y)
                x_at = (u * (X * Y) + j * X_Y)[None, :] + i * X_X
                y_at = (v * (Y * Z) + j * Y_Y)[:, None] + k * Y_Z
                x = tl.load(x_ptr + x_at, mask=mask[None, :] & (i < X), other=0.0)
                y = tl.load(y_ptr + y_at, mask=mask[:, None] & (k < Z), other=0.0)
                total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision="ieee", out_dtype=tl.float32)
        inside = (i < X) & (k < Z)
        at = i * SUM_X + k * SUM_Z
        if ((first == start) & (before == segment)) | ((last == end) & (after == segment)):
            part = 2 * chunk + (first > start).to(tl.int32)
            tl.store(parts_ptr + part * (X * Z) + at, total, mask=inside)
        else:
            tl.store(sums_ptr + segment.to(tl.int64) * (X * Z) + at, total.to(sums_ptr.dtype.element_ty), mask=inside)
        first = last


@triton.jit(do_not_specialize=["num_rows"])
def _sum_parts(
    sums_ptr, parts_ptr, ids_ptr, num_rows,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of the segment, if there is one, that starts in this chunk and goes beyond it."""
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0).to(tl.int64) // TILES
    element = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    start = chunk * CHUNK
    segment = tl.load(ids_ptr + start + CHUNK, mask=start + CHUNK < num_rows, other=-1)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    if (segment >= 0) & (before != segment) & (tl.load(ids_ptr + start + CHUNK - 1) == segment):
        part = 2 * chunk + (tl.load(ids_ptr + start) != segment).to(tl.int32)
        total = tl.load(parts_ptr + part * SIZE + element, mask=element < SIZE, other=0.0)
        chunk += 1
        while tl.load(ids_ptr + chunk * CHUNK, mask=chunk * CHUNK < num_rows, other=-1) == segment:
            chunks = chunk + tl.arange(0, BLOCK_CHUNKS)
            ids = tl.load(ids_ptr + chunks * CHUNK, mask=chunks * CHUNK < num_rows, other=-1)
            at = (2 * chunks * SIZE)[:, None] + element[None, :]
            parts = tl.load(parts_ptr + at, mask=(ids == segment)[:, None] & (element < SIZE)[None, :], other=0.0)
            total += tl.sum(parts, 0)
            chunk += BLOCK_CHUNKS
        at = segment.to(tl.int64) * SIZE + element
        tl.store(sums_ptr + at, total.to(sums_ptr.dtype.element_ty), mask=element < SIZE)


def forward(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """out[u] = a[p[u]] @ b[q[u]], or 0 where p[u] < 0: a [P, n1, r], b [Q, r, n2], p and q [U] -> [U, n1, n2].

    Raises:
        ValueError: for operands of another dtype than float32, bfloat16 or float16.
    """
    (num_rows,), (_, n1, rank), n2 = p.shape, a.shape, b.shape[2]
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a is {a.dtype}: the GPU kernels compute in float32; give float64 to impl='reference'")
    out = a.new_empty(num_rows, n1, n2)
    if 0 in (out.numel(), a.numel(), b.numel()):
        return out.zero_()
    block_1, block_2, block_r = _block(n1, 32), _block(n2, 64), 16
    block_u = min(128, 2048 // (block_1 * block_2), 8192 // (block_r * max(block_1, block_2)))
    warps = max(_warps(block_u * block_1 * block_2), block_u * block_r * max(block_1, block_2) // 2048)
    grid = (triton.cdiv(num_rows, block_u) * triton.cdiv(n1, block_1) * triton.cdiv(n2, block_2),)
    with torch.cuda.device_of(a):
        _multiply[grid](
            a.contiguous(), b.contiguous(), out, p.contiguous(), q.contiguous(), num_rows,
            N1=n1, R=rank, N2=n2,
            BLOCK_U=block_u, BLOCK_1=block_1, BLOCK_R=block_r, BLOCK_2=block_2, num_warps=warps,
        )  # fmt: skip
    return out


def backward(grad: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """da[i] = sum over {u: p[u] = i} of grad[u] @ b[q[u]]^T, and db[j] = sum over {u: q[u] = j} of a[p[u]]^T @ grad[u].

    Besides the result it takes, for da, 8 U n1 r / CHUNK bytes for parts and a few words a row for the order; for db alike.
    """
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    da, db = torch.zeros_like(a), torch.zeros_like(b)
    if 0 not in (grad.numel(), a.numel(), b.numel()):
        with torch.cuda.device_of(a):
            _sum_into(da, grad, b.mT.contiguous(), p, q)
            _sum_into(db.mT, grad.mT, a, q, p)
    return da, db


def _sum_into(sums: Tensor, x: Tensor, y: Tensor, ids: Tensor, other: Tensor) -> None:
    """sums[s] = sum over {u: ids[u] = s} of x[u] @ y[other[u]], where `sums` is zero and ids[u] is not negative."""
    (num_sums, size_x, size_z), size_y, num_rows = sums.shape, x.shape[2], len(ids)
    narrow = next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if num_sums <= torch.iinfo(dtype).max)
    ids, order = torch.sort(ids.to(narrow), stable=True)  # a radix sort takes as many passes as ids have bytes
    chunks = triton.cdiv(num_rows, CHUNK)
    parts = torch.empty(2 * chunks, size_x * size_z, dtype=torch.float32, device=x.device)
    block_x, block_y, block_z = _block(size_x, 32), _block(size_y, 32), _block(size_z, 32)
    _sum_segments[(chunks * triton.cdiv(size_x, block_x) * triton.cdiv(size_z, block_z),)](
        x, y, sums, parts, ids, order, other.index_select(0, order), num_rows,
        X=size_x, Y=size_y, Z=size_z, X_X=x.stride(1), X_Y=x.stride(2), Y_Y=y.stride(1), Y_Z=y.stride(2),
        SUM_X=sums.stride(1), SUM_Z=sums.stride(2), CHUNK=CHUNK,
        BLOCK_U=32 // block_y, BLOCK_X=block_x, BLOCK_Y=block_y, BLOCK_Z=block_z, num_warps=_warps(block_x * block_z),
    )  # fmt: skip
    block = _block(size_x * size_z, 64)
    _sum_parts[(chunks * triton.cdiv(size_x * size_z, block),)](
        sums, parts, ids, num_rows, SIZE=size_x * size_z, CHUNK=CHUNK, BLOCK_CHUNKS=32, BLOCK=block, num_warps=4
    )


def _block(size: int, largest: int) -> int:
    return min(triton.next_power_of_2(size), largest)


def _warps(accumulators: int) -> int:
    """Sixteen accumulators a thread, the 4 x 4 tile at which every operand that is read serves four products."""
    return max(1, min(4, accumulators // 512))
