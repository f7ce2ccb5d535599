"""The compiled loops of `csrc`, loaded: what each function takes, and arrays handed over with their sizes, which it checks.

Python's lock is released while one runs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(os.environ.get("DATA_PIPELINE_LIBRARY") or Path(__file__).parent / "lib" / "libdata_pipeline.so")
"""$DATA_PIPELINE_LIBRARY names another build of it."""

if not LIBRARY.exists():
    raise ImportError(
        f"the compiled loops are not at {LIBRARY}: install from a wheel, or build them with `make install` "
        "(from sources: pip install --no-build-isolation -e .)"
    )
_library = ctypes.CDLL(str(LIBRARY))
_int, _pointer = ctypes.c_int64, ctypes.POINTER


class Array(ctypes.Structure):
    """`Array` of array.h: a NumPy array's elements, which it keeps alive; a structure that copies it doesn't."""

    _fields_ = (("data", ctypes.c_void_p), ("size", _int))

    def __init__(self, array: np.ndarray, dtype: npt.DTypeLike) -> None:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"an array of {array.dtype} with strides {array.strides}, where {np.dtype(dtype)} end to end is due")
        super().__init__(array.ctypes.data, array.size)
        self.array = array


class Matrix(ctypes.Structure):
    """`Matrix` of array.h: a NumPy array [columns, rows] or its leading rows, each column end to end."""

    _fields_ = (("data", ctypes.c_void_p), ("columns", _int), ("rows", _int), ("stride", _int))

    def __init__(self, array: np.ndarray, dtype: npt.DTypeLike) -> None:
        (of_column, of_row), size = array.strides, array.itemsize
        is_apart = array.size > 0 and ((of_row != size and array.shape[1] > 1) or of_column % size)
        if array.dtype != dtype or is_apart:
            raise TypeError(f"an array of {array.dtype} with strides {array.strides}, where {np.dtype(dtype)} end to end is due")
        super().__init__(array.ctypes.data, *array.shape, of_column // size)
        self.array = array


class IdsOf(ctypes.Structure):
    """`IdsOf` of encode.cpp."""

    _fields_ = (("pairs", Array), ("bounds", Array), ("room", _int), ("buckets", _int))

    @staticmethod
    def array(columns: Sequence[IdsOf]) -> Array:
        """Of several columns."""
        structures: Any = (IdsOf * len(columns))(*columns)
        return Array(np.frombuffer(structures, np.dtype(IdsOf)), np.dtype(IdsOf))


class Schema(ctypes.Structure):
    """`Schema` of parse.cpp."""

    _fields_ = (("kinds", Array), ("separators", Array), ("separator", _int))


class Columns(ctypes.Structure):
    """`Columns` of parse.cpp."""

    _fields_ = tuple(
        (name, Array)
        for name in (
            "labels",
            "integers",
            "integer_missing",
            "keys",
            "key_missing",
            "list_keys",
            "list_ends",
            "starts",
            "bad_lines",
            "bad_starts",
            "bad_ends",
        )
    )


class Block(ctypes.Structure):
    """`Block` of parse.cpp."""

    _fields_ = (("bytes", _int), ("lines", _int), ("elements", _int))


class JsonSchema(ctypes.Structure):
    """`JsonSchema` of json.cpp."""

    _fields_ = (("names", Array), ("name_ends", Array), ("is_list", Array), ("separators", Array))


class JsonCells(ctypes.Structure):
    """`JsonCells` of json.cpp."""

    _fields_ = tuple((name, Array) for name in ("bytes", "ends", "element_ends", "is_parsed"))


def _function(name: str, *arguments: Any) -> Any:
    function = _library[name]
    function.argtypes, function.restype, function.errcheck = arguments, _int, _refuse_wrong_sizes
    return function


def _refuse_wrong_sizes(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    if result < 0:
        raise RuntimeError(f"{function.__name__}: the sizes of the arrays don't fit each other")
    return result


def _of_keys(name: str, *arguments: Any) -> dict[np.dtype, Any]:
    """A function by the dtype of its keys."""
    return {
        np.dtype(dtype): _function(f"{name}_{suffix}", *arguments) for dtype, suffix in ((np.uint32, "u32"), (np.uint64, "u64"))
    }


parse = _of_keys("parse", Array, _pointer(Schema), _pointer(Columns))
measure_block = _function("measure_block", Array, Array, _int, _int, _int, _pointer(Block))
parse_json = _function("parse_json", Array, _pointer(JsonSchema), _pointer(JsonCells), _int)
read_integers, read_labels, read_hex_digits, hash_texts = (
    _function(name, *[Array] * 4) for name in ("read_integers", "read_labels", "read_hex_digits", "hash_texts")
)
longest_line = _function("longest_line", Array)
count_sorted = _of_keys("count_sorted", Array, Array)
merge_runs = _of_keys("merge_runs", *[Array] * 6)
insert = _of_keys("insert", Array, Array, _int, _int, _int)
release_pages = _function("release_pages", Array)
return_freed_arrays = _function("return_freed_arrays")
encode_keys = _of_keys("encode_keys", Array, Matrix, Matrix, Matrix, Array)
encode_integers = _function("encode_integers", Matrix, Matrix, Array, Array, Matrix)
