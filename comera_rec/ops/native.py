"""Loads the operators of `csrc` and declares the shapes of their results, which tracers need.

L ids, T tables of d cores.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(os.environ.get("COMERA_LIBRARY") or Path(__file__).parents[1] / "lib" / "libcomera_rec.so")
"""The compiled operators, or the build of them that $COMERA_LIBRARY names. A program without Python must load this file before a
model that was exported with it."""

if not LIBRARY.exists():
    raise ImportError(
        f"the compiled operators are not at {LIBRARY}: install from a wheel, or build them with `make install` "
        "(from sources: pip install --no-build-isolation -e .)"
    )
torch.ops.load_library(LIBRARY)
ops = torch.ops.comera_rec


@torch.library.register_fake("comera_rec::plan_lookup")
def _(ids: Sequence[Tensor], num_embeddings: Sequence[int], row_shapes: Sequence[int]) -> tuple[Tensor, ...]:
    tables, order = len(ids), len(row_shapes) // len(ids)
    lookups = sum(table.numel() for table in ids)
    sizes = (
        (lookups,),
        (lookups,),
        (lookups + 1,),
        (2, lookups),
        (2, lookups if order >= 3 else 0),
        (2, lookups if order == 4 else 0),
        (3 + order, tables + 1),
    )
    return tuple(ids[0].new_empty(size, dtype=torch.int32) for size in sizes)


@torch.library.register_fake("comera_rec::pool")
def _(cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows):  # type: ignore[no-untyped-def]
    torch._check_value(
        len({tensor.device for tensor in (*cores, *diagonals)}) == 1,
        lambda: "parameters of a table are on several devices: move the model to one",
    )
    return cores[0].new_empty((offsets.shape[0] - 1) // len(slots), num_slots * num_cols, dtype=torch.float32)


@torch.library.register_fake("comera_rec::pool_backward")
def _(gradient, cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows):  # type: ignore[no-untyped-def]
    weight_gradients = gradient.new_empty(0 if weights is None else weights.shape[0])
    return [torch.empty_like(core) for core in cores], _like_diagonals(gradient, cores, plan), weight_gradients


def _like_diagonals(gradient: Tensor, cores: Sequence[Tensor], plan: Sequence[Tensor]) -> list[Tensor]:
    order, tables = plan[-1].shape[0] - 3, plan[-1].shape[1] - 1
    with_right_bond = [core for k, core in enumerate(cores[: order * tables]) if k % order != order - 1]
    return [gradient.new_empty(core.shape[3]) for core in (*with_right_bond, *cores[order * tables :: 2])]


@torch.library.register_fake("comera_rec::interact")
def _(lead: Tensor, rows: Tensor) -> Tensor:
    features = rows.shape[1] + 1
    return lead.new_empty(lead.shape[0], lead.shape[1] + features * (features - 1) // 2)


@torch.library.register_fake("comera_rec::interact_backward")
def _(gradient: Tensor, lead: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(lead), rows.new_empty(rows.shape)
