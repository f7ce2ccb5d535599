"""Loops of compiled kernels on torch's own OpenMP threads.

Numba has thread pools of its own, and torch's threads spin for milliseconds after each operator: where every core has a thread,
a kernel on a second pool takes twice its time. So kernels run on the pool that torch is linked with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

_PARAMS = types.CPointer(types.int64)


def kernel(body: Callable) -> Callable[..., None]:
    """Compile `body(params)` and return run(num_tasks, *params), which calls it on every thread.

    The body takes tasks until `next_task(params)` is `params[1]`, their number; its own parameters start at `params[2]`: integers,
    and addresses of tensors, or zero for None. It is compiled when first run and kept on disk for the next process.
    """
    compiled: Any = None

    def run(num_tasks: int, *params: Tensor | int | None) -> None:
        nonlocal compiled
        if compiled is None:
            compiled = cfunc(types.void(_PARAMS), cache=True, nogil=True)(body)
        addresses = (param.data_ptr() if isinstance(param, Tensor) else param or 0 for param in params)
        packed = np.array([0, num_tasks, *addresses], dtype=np.int64)
        if num_tasks > 1 and torch.get_num_threads() > 1 and _GOMP_PARALLEL is not None:
            _GOMP_PARALLEL(compiled.address, packed.ctypes.data, min(num_tasks, torch.get_num_threads()), 0)
        elif num_tasks:
            _CALL(compiled.address)(packed.ctypes.data)

    return run


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _gomp_parallel() -> Callable[..., None] | None:
    """GOMP_parallel of the OpenMP runtime that torch uses; GNU's and LLVM's have it. Without one, kernels run on one thread."""
    try:
        # Looked up through torch's library, the symbol is that of the runtime it was linked with, whatever that is called.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


_GOMP_PARALLEL = _gomp_parallel()


@intrinsic
def next_task(typingctx, params):  # type: ignore[no-untyped-def]
    """The next task of a kernel's loop; no other thread gets the same."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(params), codegen


@intrinsic
def int64_at(typingctx, address):  # type: ignore[no-untyped-def]
    """An address as a pointer to int64."""
    return types.CPointer(types.int64)(address), _as_pointer


@intrinsic
def float32_at(typingctx, address):  # type: ignore[no-untyped-def]
    """An address as a pointer to float32."""
    return types.CPointer(types.float32)(address), _as_pointer


def _as_pointer(context, builder, signature, args):  # type: ignore[no-untyped-def]
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        emit_prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(address), codegen


def emit_prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """LLVM's prefetch: for reading, into all levels, data."""
    number = ir.IntType(32)
    prototype = ir.FunctionType(ir.VoidType(), (pointer.type, number, number, number))
    function = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0")
    builder.call(function, [pointer, number(0), number(3), number(1)])
