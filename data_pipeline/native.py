"""Bindings of the compiled loops in `csrc`: their signatures, and arrays passed with their sizes, which the functions check.

A running function does not hold Python's lock.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(os.environ.get("DATA_PIPELINE_LIBRARY") or Path(__file__).parent / "lib" / "libdata_pipeline.so")
"""Path of the compiled library; $DATA_PIPELINE_LIBRARY overrides it."""

if not LIBRARY.exists():
    raise ImportError(
        f"there is no compiled library at {LIBRARY}: install from a wheel, or build it with `make install` "
        "(from sources: pip install --no-build-isolation -e .)"
    )
_library = ctypes.CDLL(str(LIBRARY))
_int, _pointer = ctypes.c_int64, ctypes.POINTER
_M_MMAP_THRESHOLD = -3  # in malloc.h


class Array(ctypes.Structure):
    """`Array` of array.h: the elements of a NumPy array, which it keeps alive; structures that copy it don't."""

    _fields_ = (("data", ctypes.c_void_p), ("size", _int))

    def __init__(self, array: np.ndarray, dtype: npt.DTypeLike) -> None:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"expected contiguous {np.dtype(dtype)}, got an array of {array.dtype} with strides {array.strides}")
        super().__init__(array.ctypes.data, array.size)
        self.array = array


class Matrix(ctypes.Structure):
    """`Matrix` of array.h: a NumPy array [columns, rows] or its leading rows, each column contiguous."""

    _fields_ = (("data", ctypes.c_void_p), ("columns", _int), ("rows", _int), ("stride", _int))

    def __init__(self, array: np.ndarray, dtype: npt.DTypeLike) -> None:
        (column_stride, row_stride), size = array.strides, array.itemsize
        has_gaps = array.size > 0 and ((row_stride != size and array.shape[1] > 1) or column_stride % size)
        if array.dtype != dtype or has_gaps:
            raise TypeError(f"expected contiguous {np.dtype(dtype)}, got an array of {array.dtype} with strides {array.strides}")
        super().__init__(array.ctypes.data, *array.shape, column_stride // size)
        self.array = array


class Schema(ctypes.Structure):
    """`Schema` of parse.cpp."""

    _fields_ = (("kinds", Array), ("separators", Array), ("separator", _int))


class Columns(ctypes.Structure):
    """`Columns` of parse.cpp."""

    _fields_ = tuple(
        (name, Array)
        for name in (
            "labels", "integers", "integer_missing", "keys", "key_missing", "list_keys", "list_begins", "list_ends", "starts",
            "bad_lines", "bad_starts", "bad_ends",
        )
    )  # fmt: skip


def _function(name: str, *arguments: Any) -> Any:
    function = _library[name]
    function.argtypes, function.restype, function.errcheck = arguments, _int, _refuse_wrong_sizes
    return function


def _refuse_wrong_sizes(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    if result < 0:
        raise RuntimeError(f"{function.__name__}: the sizes of the arrays don't fit each other")
    return result


def _by_key_dtype(name: str, *arguments: Any) -> dict[np.dtype, Any]:
    """Return a function's variants by the dtype of their keys."""
    return {
        np.dtype(dtype): _function(f"{name}_{suffix}", *arguments) for dtype, suffix in ((np.uint32, "u32"), (np.uint64, "u64"))
    }


parse = _by_key_dtype("parse", Array, _pointer(Schema), _pointer(Columns))
count_cells = _function("count_cells", Array, _pointer(Schema), Array)
read_integers, read_labels, read_hex_digits, hash_texts = (
    _function(name, *[Array] * 4) for name in ("read_integers", "read_labels", "read_hex_digits", "hash_texts")
)
insert = _by_key_dtype("insert", Array, Array, _int, _int, _int)
release_pages = _function("release_pages", Array)
encode_keys = _by_key_dtype("encode_keys", Array, Matrix, Matrix, Matrix, Array)


def return_freed_arrays() -> None:
    """From now on, return arrays of 1 MiB or more to the system when they are freed.

    glibc would otherwise start to keep them in its heap, in whose gaps later arrays don't fit: a quarter of peak memory.
    """
    if hasattr(_library, "mallopt"):  # glibc
        _library.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
