"""Memory layout of a TT table's cores: slice after slice, so that a lookup reads each slice from consecutive addresses.

The k-th core (r_{k-1}, m, n, r_k) of a table is stored as (m, r_{k-1}, r_k, n) in the leading half of its cores and as
(m, r_k, r_{k-1}, n) in the trailing half: within a slice, the bond nearer to the end of the table is outermost. Only strides
change, never shapes.
"""

from collections.abc import Sequence

from torch import Tensor

_LEADING, _TRAILING = (1, 0, 3, 2), (1, 3, 0, 2)


def slice_major(core: Tensor, k: int, order: int) -> Tensor:
    """Return the k-th of `order` cores laid out slice after slice: the same tensor if it already is.

    Args:
        core: (r_{k-1}, m, n, r_k), of any strides.
        k: the core's number, from 0.
        order: the number of cores.
    """
    r0, _, n, r1 = core.shape
    is_leading = k < (order + 1) // 2
    # The usual case, checked first because it is cheap; where a size is 1, its stride doesn't matter.
    if core.stride() == ((n * r1, r0 * n * r1, 1, n) if is_leading else (n, r0 * n * r1, 1, r0 * n)):
        return core
    if is_slice_major(core, k, order):
        return core
    axes = _axes(k, order)
    return core.permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])


def slice_major_stride(shape: Sequence[int], k: int, order: int) -> tuple[int, ...]:
    """Return the strides of the k-th of `order` cores of a shape, laid out slice after slice."""
    strides, step = [0] * 4, 1
    for axis in reversed(_axes(k, order)):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def is_slice_major(core: Tensor, k: int, order: int) -> bool:
    """Return whether the k-th of `order` cores is laid out slice after slice."""
    shape, strides, step = core.shape, core.stride(), 1
    for axis in reversed(_axes(k, order)):
        if shape[axis] != 1 and strides[axis] != step:
            return core.numel() == 0
        step *= shape[axis]
    return True


def _axes(k: int, order: int) -> tuple[int, int, int, int]:
    return _LEADING if k < (order + 1) // 2 else _TRAILING
