"""The launches of a training step on a GPU at the usual sizes, and the types of their tensors.

n1 x r and r x n2: a slice of each core of a table of order 2 with n1 n2 columns. U unique rows of L ids in L bags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from comera_rec.ops.bags import triton as bags
from comera_rec.ops.bags import triton_updates as updates
from comera_rec.ops.launch import Launch
from comera_rec.ops.plan import triton as plans

SIZES = ((8, 8, 8), (8, 16, 8), (8, 32, 8), (4, 16, 16), (8, 16, 16))
"""Dims 64 and 128 at ranks 8 to 32."""
MOST_USED = (8, 16, 8)
_FLOAT, _INT, _LONG = "*fp32", "*i32", "*i64"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A launch, the types of its tensors, and its size."""

    launch: Launch
    tensors: Mapping[str, str]
    size: tuple[int, ...]
    """(n1, r, n2), or the columns of a row."""
    what: str

    @property
    def in_all(self) -> bool:
        """Whether it is compiled for every architecture: in float32 and of the usual size; the others are compiled for one."""
        return "bfloat16" not in self.what and (len(self.size) < 3 or self.size == MOST_USED)

    def __str__(self) -> str:
        return " ".join([self.what, *filter(None, ["x".join(map(str, self.size))])])


def step_calls(n1: int, rank: int, n2: int) -> list[Call]:
    """The Triton launches of a step that updates cores in backward by Adagrad: seven tables, batches of 16,384, one id per bag."""
    ids, tables = 114_688, 7
    dim, size = n1 * n2, (n1, rank, n2)
    sizes = bags.Sizes(num_ids=ids, counts=(13_645, 13_287), n1=n1, rank=rank, n2=n2, num_cols=dim, scaled=True, aligned=True)
    how: dict[str, Any]
    mode: dict[str, Any]
    how, mode = {"num_bags": ids, "features": tables}, {"mode": "sum", "weighted": False}
    no_settings = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.0}
    operands = {"a_ptr": _FLOAT, "b_ptr": _FLOAT, "d_ptr": _FLOAT, "tables_ptr": _LONG, "pairs_ptr": _INT}
    pooled = {"offsets_ptr": _LONG, "weights_ptr": _FLOAT, "targets_ptr": _INT}
    sums = {"left_ptr": _FLOAT, "right_ptr": _FLOAT}
    sorted_ids = {"slices_ptr": "*i16", "order_ptr": _LONG}
    summed = {
        **sums, **sorted_ids, **pooled, "owners_ptr": _INT, "tables_ptr": _LONG, "pairs_ptr": _INT, "grad_ptr": _FLOAT,
        "a_ptr": _FLOAT, "b_ptr": _FLOAT,
    }  # fmt: skip
    owned = {**sums, "left_owners_ptr": _INT, "right_owners_ptr": _INT}
    ends = {"tables_ptr": _LONG, "d_ptr": _FLOAT, "products_ptr": _FLOAT, "lr_ptr": _FLOAT, "seed_ptr": _LONG}
    finished = {
        **owned, **ends, "pairs_ptr": _INT, "a_ptr": _FLOAT, "b_ptr": _FLOAT, "left_result_ptr": _FLOAT, "right_result_ptr": _FLOAT,
    }  # fmt: skip
    split = {"ids_ptr": _LONG, "tables_ptr": _LONG, "pairs_ptr": _INT, "keys_ptr": "*i16"}
    launches = [
        ("plan", plans.split_launch(ids, ids // tables, sizes.counts[0], tables), split, (tables,)),
        ("pool", bags.pool_launch(sizes, **how, **mode), {**operands, **pooled, "out_ptr": _FLOAT}, size),
        ("gradient of weights", bags.weights_launch(sizes, num_bags=ids),
         {**operands, "grad_ptr": _FLOAT, "targets_ptr": _INT, "offsets_ptr": _LONG, "out_ptr": _FLOAT}, size),
        ("gradient of slices", bags.slices_launch(sizes, **how, **mode, num_owners=sum(sizes.counts)), summed, size),
        ("parts of slices", updates.parts_launches(sizes)[0], {**owned, **sorted_ids}, ()),
        ("groups of parts", updates.parts_launches(sizes)[1], {**owned, **sorted_ids}, ()),
        ("update of slices", updates.finish_launch(sizes, updates.ADAGRAD, no_settings), finished, (n1, n2)),
        ("update of diagonals", updates.diagonals_launch(sizes, tables, updates.ADAGRAD, no_settings),
         {**ends, "result_ptr": _FLOAT}, ()),
    ]  # fmt: skip
    return [Call(launch=launch, tensors=tensors, size=size, what=what) for what, launch, tensors, size in launches]


def _of_bfloat16(tensors: Mapping[str, str]) -> dict[str, str]:
    """Replace the types of parameters and states by bfloat16."""
    parameters = {"a_ptr", "b_ptr", "d_ptr", "result_ptr", "left_result_ptr", "right_result_ptr"}
    return {name: "*bf16" if name in parameters else kind for name, kind in tensors.items()}


def calls() -> list[Call]:
    """One launch of every kernel that the usual sizes compile."""
    by_variant: dict[object, Call] = {}
    for n1, rank, n2 in SIZES:
        for call in step_calls(n1, rank, n2):
            by_variant.setdefault((call.launch.variant, tuple(sorted(call.tensors.items()))), call)
    updates_of_float32 = [call for call in step_calls(*MOST_USED) if call.what.startswith("update")]
    return [
        *by_variant.values(),
        *(replace(call, tensors=_of_bfloat16(call.tensors), what=f"{call.what}, bfloat16") for call in updates_of_float32),
    ]
