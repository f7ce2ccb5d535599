"""NumPy's arrays as Arrow's, in place; pyarrow's conversion imports pandas, which takes longer than ten thousand rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def to_arrow(values: np.ndarray) -> pa.Array:
    """Numbers end to end as a column without nulls."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def to_lists(elements: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A column of lists, end to end in `elements`."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(to_arrow(ends), to_arrow(elements))
