"""The launches of a training step on a GPU, at the sizes in use, and the types of their tensors.

n1 x r times r x n2: the two cores of a table of order 2 with n1 n2 columns. U unique rows of L ids in as many bags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from comera_rec.ops.bags import triton as bags
from comera_rec.ops.gathered_matmul import triton as products
from comera_rec.ops.launch import Launch

SIZES = ((8, 8, 8), (8, 16, 8), (8, 32, 8), (4, 16, 16), (8, 16, 16))
"""Dims 64 and 128 at ranks 8 to 32."""
MOST_USED = (8, 16, 8)
_FLOAT, _INT, _LONG = "*fp32", "*i32", "*i64"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A launch, what its tensors are, and of which size."""

    launch: Launch
    tensors: Mapping[str, str]
    size: tuple[int, ...]
    """(n1, r, n2), or the columns of a row."""
    what: str

    @property
    def in_all(self) -> bool:
        """Of the size that is compiled for every architecture; the others are for one."""
        return self.size in (MOST_USED, (64,)) or (len(self.size) == 2 and set(self.size) <= set(MOST_USED))

    def __str__(self) -> str:
        return f"{self.what} {'x'.join(map(str, self.size))}"


def step_calls(n1: int, rank: int, n2: int, *, ids: int, rows: int, features: int, slices: tuple[int, int]) -> list[Call]:
    """The Triton launches of forward and backward.

    Args:
        n1, rank, n2: as above.
        ids: L, one each bag.
        rows: U; kernels are launched over L all the same, because nobody waits for the device to tell.
        features: F.
        slices: of all tables' first, and last cores.
    """
    dim, size = n1 * n2, (n1, rank, n2)
    summed = {"x_ptr": _FLOAT, "y_ptr": _FLOAT, "sums_ptr": _FLOAT, "parts_ptr": _FLOAT, "order_ptr": _LONG, "other_ptr": _LONG}
    narrow = "*i16" if slices[1] < 1 << 15 else _INT
    pooled = {"offsets_ptr": _LONG, "inverse_ptr": _LONG, "weights_ptr": _FLOAT, "bags_ptr": _INT, "chosen_ptr": _INT}
    multiplied = {"a_ptr": _FLOAT, "b_ptr": _FLOAT, "out_ptr": _FLOAT, "p_ptr": _LONG, "q_ptr": _LONG}
    parts = {"sums_ptr": _FLOAT, "parts_ptr": _FLOAT}
    first = products.segments_launch(ids, slices[0], n1, n2, rank, flipped=False, ordered=True)
    last = products.segments_launch(ids, slices[1], n2, n1, rank, flipped=True, ordered=False)
    backward = bags.sum_ids_launch(ids, ids, features, dim, dim, "sum", weighted=False)
    of_ids = {**pooled, "grad_ptr": _FLOAT, "order_ptr": _LONG, "sums_ptr": _FLOAT, "parts_ptr": _FLOAT, "sorted_ptr": _INT}
    forward = bags.pool_launch(ids, features, dim, dim, "sum", weighted=False)
    launches = [
        ("multiply", products.multiply_launch(ids, *size, ascends=True), multiplied, size),
        ("pool", forward, {**pooled, "rows_ptr": _FLOAT, "out_ptr": _FLOAT}, (dim,)),
        ("gradient of rows", backward, of_ids, (dim,)),
        ("parts of rows", products.parts_launch(ids, ids, dim), {**parts, "ids_ptr": _INT}, (dim,)),
        ("gradient of first core", first, {**summed, "ids_ptr": _LONG}, size),
        ("parts of first core", products.parts_launch(ids, slices[0], n1 * rank), {**parts, "ids_ptr": _LONG}, (n1, rank)),
        ("gradient of last core", last, {**summed, "ids_ptr": narrow}, size),
        ("parts of last core", products.parts_launch(ids, slices[1], n2 * rank), {**parts, "ids_ptr": narrow}, (rank, n2)),
    ]
    return [Call(launch=launch, tensors=tensors, size=size, what=what) for what, launch, tensors, size in launches]


def calls() -> list[Call]:
    """Every kernel that the sizes in use compile, once."""
    found: dict[object, Call] = {}
    for n1, rank, n2 in SIZES:
        for call in step_calls(n1, rank, n2, ids=114_688, rows=49_382, features=7, slices=(9_000, 9_000)):
            found.setdefault((call.launch.variant, tuple(sorted(call.tensors.items()))), call)
    return list(found.values())
