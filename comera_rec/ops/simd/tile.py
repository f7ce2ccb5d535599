"""Sums of products of gathered slices, held in vector registers.

C[z_s] = sum over t in [starts_s, starts_{s+1}) of A[x_t] B[y_t], all float32. A tile of C (up to 8 x 1, 8 x 2 or 4 x 4 vectors) is
in registers over all of its t, so only operands are read and every element of C is written once, its terms added in one order: the
result does not depend on the number of threads.

Loops that Numba compiles from Python are vectorized along one axis and keep no such tile, hence LLVM written by hand. It is in
vectors of one width, which LLVM maps on what the machine has.
"""

from __future__ import annotations

from typing import NamedTuple

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from comera_rec.ops.simd.parallel import emit_prefetch

WIDTH = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
_AHEAD = 6  # products; slices are gathered, and what is asked for this early has arrived when it is needed

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_MASK = ir.VectorType(ir.IntType(1), WIDTH)
_ALIGNMENT = _INT32(4)
_FEW = 8  # floats gathered one by one


class Products(NamedTuple):
    """What to compute; strides count elements.

    A tensor stands for its address. Where there are several kinds of products, a field may be an array with a number for each.
    """

    c: Tensor | np.ndarray | int
    c_slice: np.ndarray | int
    """Elements from the beginning of C[z] to that of C[z + 1], `a_slice` and `b_slice` alike."""
    a: Tensor | np.ndarray | int
    a_slice: np.ndarray | int
    a_row: np.ndarray | int
    """From one row of a slice of A to the next, and `a_col` from one column: A may be read transposed."""
    a_col: np.ndarray | int
    b: Tensor | np.ndarray | int
    b_slice: np.ndarray | int
    starts: Tensor
    """int64: `starts`, one longer than `zs`, which is as long as C; `xs` and `ys`."""
    xs: Tensor
    ys: Tensor
    zs: Tensor
    rows: np.ndarray | int
    """Of a slice of A and C. Rows of B and C lie side by side, each contiguous."""
    depth: np.ndarray | int
    """Columns of a slice of A and rows of one of B."""
    cols: np.ndarray | int
    """Of a slice of B and C."""


def numbers(products: Products, kinds: int = 1) -> Tensor:
    """[kinds, fields]: as kernels take them, for as long as their tensors live."""
    rows = np.empty((kinds, len(products)), np.int64)
    for k, field in enumerate(products):
        rows[:, k] = field.data_ptr() if isinstance(field, Tensor) else field
    return torch.from_numpy(rows)


def _tile(height: int, vectors: int):  # type: ignore[no-untyped-def]
    """Compute rows i.. and columns j.. of C[z_s] for s0 <= s < s1: `height` rows, `vectors` vectors or as far as C goes."""

    @intrinsic
    def tile(typingctx, products, i, j, s0, s1):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            products, i, j, s0, s1 = args
            of = Products(*(_at(builder, products, _INT64(k)) for k in range(len(Products._fields))))
            c, a, b = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (of.c, of.a, of.b))
            starts, xs, ys, zs = (builder.inttoptr(address, _INT64.as_pointer()) for address in (of.starts, of.xs, of.ys, of.zs))
            c = builder.gep(c, [builder.add(builder.mul(i, of.cols), j)])
            a = builder.gep(a, [builder.mul(i, of.a_row)])
            b = builder.gep(b, [j])
            row_of = _RowOf(builder, builder.sub(of.cols, j), vectors)
            last = builder.sub(_at(builder, starts, s1), _INT64(1))
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(height)]
            with cgutils.for_range_slice(builder, s0, s1, _INT64(1)) as (s, _):
                for cell in (cell for line in sums for cell in line):
                    builder.store(_VECTOR([0.0] * WIDTH), cell)
                end = _at(builder, starts, builder.add(s, _INT64(1)))
                with cgutils.for_range_slice(builder, _at(builder, starts, s), end, _INT64(1)) as (t, _):
                    a_t = builder.gep(a, [builder.mul(_at(builder, xs, t), of.a_slice)])
                    b_t = builder.gep(b, [builder.mul(_at(builder, ys, t), of.b_slice)])
                    ahead = builder.add(t, _INT64(_AHEAD))
                    ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
                    b_ahead = builder.gep(b, [builder.mul(_at(builder, ys, ahead), of.b_slice)])
                    with cgutils.for_range(builder, of.depth) as inner:
                        row = builder.mul(inner.index, of.cols)
                        emit_prefetch(builder, builder.gep(b_ahead, [row]))
                        b_k = row_of.load(builder.gep(b_t, [row]))
                        a_k = builder.gep(a_t, [builder.mul(inner.index, of.a_col)])
                        for m, line in enumerate(sums):
                            a_mk = _splat(builder, _at(builder, a_k, builder.mul(_INT64(m), of.a_row)))
                            for cell, b_kn in zip(line, b_k, strict=True):
                                builder.store(_multiply_add(builder, a_mk, b_kn, builder.load(cell)), cell)
                c_s = builder.gep(c, [builder.mul(_at(builder, zs, s), of.c_slice)])
                for m, line in enumerate(sums):
                    row_of.store([builder.load(cell) for cell in line], builder.gep(c_s, [builder.mul(_INT64(m), of.cols)]))
            return context.get_dummy_value()

        return types.void(products, *[types.int64] * 4), codegen

    return tile


class _RowOf:
    """Loads and stores of one row of a tile: `vectors` vectors, the last of which may reach beyond the `cols` columns left."""

    def __init__(self, builder: ir.IRBuilder, cols: ir.Value, vectors: int) -> None:
        lanes = ir.VectorType(_INT64, WIDTH)(list(range((vectors - 1) * WIDTH, vectors * WIDTH)))
        self._builder, self._vectors = builder, vectors
        self._mask = builder.icmp_signed("<", lanes, _splat(builder, cols))

    def load(self, row: ir.Value) -> list[ir.Value]:
        *whole, last = self._pointers(row)
        values = [self._builder.load(pointer) for pointer in whole]
        for value in values:
            value.align = 4
        function = _intrinsic(self._builder, "masked.load", _VECTOR, (last.type, _INT32, _MASK, _VECTOR), ".p0")
        return [*values, self._builder.call(function, [last, _ALIGNMENT, self._mask, _VECTOR([0.0] * WIDTH)])]

    def store(self, values: list[ir.Value], row: ir.Value) -> None:
        *whole, last = self._pointers(row)
        for value, pointer in zip(values, whole, strict=False):
            self._builder.store(value, pointer).align = 4
        function = _intrinsic(self._builder, "masked.store", ir.VoidType(), (_VECTOR, last.type, _INT32, _MASK), ".p0")
        self._builder.call(function, [values[-1], last, _ALIGNMENT, self._mask])

    def _pointers(self, row: ir.Value) -> list[ir.Value]:
        vectors = (self._builder.gep(row, [_INT64(k * WIDTH)]) for k in range(self._vectors))
        return [self._builder.bitcast(pointer, _VECTOR.as_pointer()) for pointer in vectors]


def _at(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
    return builder.load(builder.gep(pointer, [index]))


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    vector = ir.VectorType(value.type, WIDTH)
    first = builder.insert_element(vector(ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(first, vector(ir.Undefined), ir.VectorType(_INT32, WIDTH)([0] * WIDTH))


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.call(_intrinsic(builder, "fma", _VECTOR, (_VECTOR, _VECTOR, _VECTOR)), [a, b, c])


def _intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: tuple[ir.Type, ...], suffix: str = "") -> ir.Function:
    prototype = ir.FunctionType(result, args)
    return cgutils.get_or_insert_function(builder.module, prototype, f"llvm.{name}.v{WIDTH}f32{suffix}")


@intrinsic
def stream(typingctx, target, source, count):  # type: ignore[no-untyped-def]
    """Copy `count` floats, whole vectors, between addresses; the target, aligned to a vector, is written past the caches.

    An ordinary store first reads the line that it is about to overwrite.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, source = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in args[:2])
        with cgutils.for_range(builder, builder.sdiv(args[2], _INT64(WIDTH))) as loop:
            value = builder.load(builder.gep(source, [loop.index]))
            value.align = 4
            store = builder.store(value, builder.gep(target, [loop.index]))
            store.align = 4 * WIDTH
            store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(target, source, count), codegen


@intrinsic
def scale_rows(typingctx, target, to_next, source, from_next, rows, count, factor):  # type: ignore[no-untyped-def]
    """Multiply rows of `count` floats by a factor, from addresses `from_next` floats apart to those `to_next` apart.

    Loops that Numba compiles take several times as long for rows so short.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, to_next, source, from_next, rows, count, factor = args
        target, source = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (target, source))
        factor = _splat(builder, factor)
        with cgutils.for_range_slice(builder, _INT64(0), count, _INT64(WIDTH)) as (first, _):
            row_of = _RowOf(builder, builder.sub(count, first), 1)
            with cgutils.for_range(builder, rows) as loop:
                (value,) = row_of.load(builder.gep(source, [builder.add(first, builder.mul(loop.index, from_next))]))
                row_of.store(
                    [builder.fmul(value, factor)], builder.gep(target, [builder.add(first, builder.mul(loop.index, to_next))])
                )
        return context.get_dummy_value()

    return types.void(target, to_next, source, from_next, rows, count, factor), codegen


@intrinsic
def gather_rows(typingctx, target, to_next, source, from_next, rows, count, stride):  # type: ignore[no-untyped-def]
    """Copy rows of `count` floats, `stride` apart, to contiguous ones; as `scale_rows`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, to_next, source, from_next, rows, count, stride = args
        target, source = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (target, source))
        whole = builder.and_(count, _INT64(-_FEW))
        with cgutils.for_range(builder, rows) as loop:
            row, out = (
                builder.gep(pointer, [builder.mul(loop.index, step)]) for pointer, step in ((source, from_next), (target, to_next))
            )
            with cgutils.for_range_slice(builder, _INT64(0), whole, _INT64(_FEW)) as (first, _):
                few = ir.VectorType(_FLOAT, _FEW)(ir.Undefined)
                for lane in range(_FEW):
                    place = builder.mul(builder.add(first, _INT64(lane)), stride)
                    few = builder.insert_element(few, _at(builder, row, place), _INT32(lane))
                builder.store(few, builder.bitcast(builder.gep(out, [first]), few.type.as_pointer())).align = 4
            with cgutils.for_range_slice(builder, whole, count, _INT64(1)) as (place, _):
                builder.store(_at(builder, row, builder.mul(place, stride)), builder.gep(out, [place]))
        return context.get_dummy_value()

    return types.void(target, to_next, source, from_next, rows, count, stride), codegen


_8x1, _8x2 = _tile(8, 1), _tile(8, 2)
_4x1, _4x2, _4x4 = _tile(4, 1), _tile(4, 2), _tile(4, 4)
_2x1, _2x2, _2x4 = _tile(2, 1), _tile(2, 2), _tile(2, 4)
_1x1, _1x2, _1x4 = _tile(1, 1), _tile(1, 2), _tile(1, 4)


@njit(nogil=True, cache=True)
def sum_products(products, s0, s1, rows, cols):  # type: ignore[no-untyped-def]
    """Compute C[z_s] for s0 <= s < s1; `products` points to the numbers of a `Products`, of which rows and cols are repeated."""
    j = 0
    while j < cols:
        vectors = (cols - j + WIDTH - 1) // WIDTH
        i = 0
        while i < rows:
            left = rows - i
            if vectors == 1:
                if left >= 8:
                    _8x1(products, i, j, s0, s1)
                    i += 8
                elif left >= 4:
                    _4x1(products, i, j, s0, s1)
                    i += 4
                elif left >= 2:
                    _2x1(products, i, j, s0, s1)
                    i += 2
                else:
                    _1x1(products, i, j, s0, s1)
                    i += 1
            elif vectors < 4:
                if left >= 8:
                    _8x2(products, i, j, s0, s1)
                    i += 8
                elif left >= 4:
                    _4x2(products, i, j, s0, s1)
                    i += 4
                elif left >= 2:
                    _2x2(products, i, j, s0, s1)
                    i += 2
                else:
                    _1x2(products, i, j, s0, s1)
                    i += 1
            else:
                if left >= 4:
                    _4x4(products, i, j, s0, s1)
                    i += 4
                elif left >= 2:
                    _2x4(products, i, j, s0, s1)
                    i += 2
                else:
                    _1x4(products, i, j, s0, s1)
                    i += 1
        j += WIDTH * (1 if vectors == 1 else (2 if vectors < 4 else 4))
