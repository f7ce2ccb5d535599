"""Bags of rows of TT tables, without forming the tables.

L ids in bags, U unique rows of N columns, F features of B bags each. T tables, which may differ in row modes, ranks and hot blocks,
are looked up in one call.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.bags import cpu, gpu, reference
from comera_rec.ops.bags.cpu import Slots, write_slots
from comera_rec.ops.bags.table import HotBlock, Table, TableGroup
from comera_rec.ops.bags.updates import refuse_row_wise
from comera_rec.ops.derivatives import in_plain_torch
from comera_rec.ops.plan import LookupPlan, PairPlan
from data_pipeline.errors import UserError

MODES = ("sum", "mean", "max")
IMPLEMENTATIONS = ("reference", "cpu", "triton")

__all__ = [
    "MODES",
    "HotBlock",
    "Slots",
    "Table",
    "TableGroup",
    "check_ids",
    "require_bags_impl",
    "resolve_bags_impl",
    "tt_bags",
    "write_slots",
]


def tt_bags(
    tables: TableGroup | Sequence[Table | tuple[Sequence[Tensor], Sequence[Tensor]]],
    plan: LookupPlan | PairPlan,
    offsets: Tensor,
    *,
    num_cols: int,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    features: int = 1,
    impl: str = "auto",
    update_in_backward: bool = True,
    slots: Slots | None = None,
) -> Tensor:
    """Pool rows of TT tables, as `torch.nn.functional.embedding_bag` pools those of dense tables.

    A row is a product of the slices that its digits select. On CPU each unique row, and each unique leading and trailing half, is
    formed once: CoMERA, section 4.1 (arXiv 2405.14377). Gradients are summed in the order of rows, so the number of threads doesn't
    change results, except those of impl "reference".

    Args:
        tables: `Table`s, or pairs of cores and diagonals, that differ only in row modes, ranks and hot blocks; a `TableGroup` of
            them, kept while their parameters stay the same, saves work before each lookup.
        plan: from `plan_lookup`, for the row modes of these tables.
        offsets: [F*B + 1] starts of the bags, feature by feature, and the end of the last one.
        num_cols: columns of a row, at most n_1...n_d; further columns are padding.
        mode: "sum", "mean" or "max".
        per_sample_weights: [L]; mode "sum" only.
        features: F.
        impl: "auto", or "reference" (any device and type), "cpu" or "triton" (GPU), which compute in float32.
        update_in_backward: whether cores whose optimizers were applied in backward are updated there, slice by slice; see
            `comera_rec.ops.bags.updates`.
        slots: where to write the bags among those of other lookups, for float32 cores and impl "cpu", except mode "max".

    Returns:
        [B, F * num_cols]: a sample's bags side by side, of the cores' dtype. With `slots` [B, slots.per_sample * num_cols].

    Raises:
        ValueError: for offsets that don't ascend from 0 to at most L, or a plan for other tables (checked on CPU); for
            weights whose number isn't that of the ids; for an implementation that is unknown or can't run there.
        NotImplementedError: for weights in a mode other than "sum", as in torch.
    """
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}: choose one of {', '.join(map(repr, MODES))}")
    if per_sample_weights is not None and mode != "sum":
        raise NotImplementedError(f"per_sample_weights need mode 'sum', not {mode!r}: drop them or change the mode")
    if per_sample_weights is not None and per_sample_weights.shape != (plan.num_ids,):
        raise UserError(f"there are {per_sample_weights.shape[0]} per_sample_weights for {plan.num_ids} ids: give one for each")
    group = tables if isinstance(tables, TableGroup) else TableGroup(tables)
    first, order = group.tables[0].cores[0], len(group.tables[0].cores)
    impl = resolve_bags_impl(impl, first.device, first.dtype, order)
    if impl == "cpu" and in_plain_torch():
        impl = "reference"
    assert slots is None or (impl == "cpu" and mode != "max"), "only sums and means by the CPU operators are written into slots"
    offsets, weights = offsets.contiguous() if impl == "triton" else offsets.long().contiguous(), per_sample_weights
    if weights is not None:  # the CPU operator sums in float32, whatever the tables' type
        weights = weights.to(torch.float32 if impl == "cpu" else first.dtype).contiguous()
    if impl != "cpu" or mode == "max":  # otherwise the CPU operator checks them
        _require_ascending(offsets, plan)
    made_for = "triton" if isinstance(plan, PairPlan) else "cpu" if plan.rows.dtype == torch.int32 else "reference"
    if made_for != impl and (impl != "reference" or made_for == "triton"):
        raise UserError(f"impl is {impl!r}, but the plan is for {made_for!r}: make it with plan_lookup(..., impl={impl!r})")
    if impl == "reference":
        assert not isinstance(plan, PairPlan)
        if update_in_backward:
            refuse_row_wise(group.tables, "impl 'reference' (float64, order 1) forms gradients of whole cores; use Adagrad")
        return reference.pool(group.tables, plan, offsets, weights, mode=mode, features=features, num_cols=num_cols)
    pool: Any = gpu.pool if impl == "triton" else cpu.pool
    options: dict[str, Any] = {"num_cols": num_cols, "update": update_in_backward}
    if slots is not None:
        options["slots"] = slots
    if mode == "max":  # look up the row of every id, then take maxima over bags
        ends = torch.arange(plan.num_ids + 1, device=offsets.device)
        rows = pool(group, plan, ends, None, mode="sum", features=1, **options)
        bags: Tensor = reference.pool_rows(rows, ends[:-1], offsets, mode=mode, features=features)
    else:
        bags = pool(group, plan, offsets, weights, mode=mode, features=features, **options)
    return bags.to(first.dtype)


def resolve_bags_impl(impl: str, device: torch.device, dtype: torch.dtype, order: int) -> str:
    """Return the implementation to use; "auto" is the fastest one for the device and type.

    Raises:
        ValueError: for an implementation that is unknown or can't run there.
    """
    require_bags_impl(impl)
    on_cpu = device.type in ("cpu", "meta")
    if impl == "auto" and on_cpu:
        return "cpu" if dtype in cpu.DTYPES and order > 1 else "reference"
    has_triton = importlib.util.find_spec("triton") is not None
    if impl == "auto":
        return "triton" if has_triton and device.type == "cuda" and dtype in cpu.DTYPES else "reference"
    if impl == "cpu" and not on_cpu:
        raise UserError(f"impl is 'cpu', but the tensors are on {device}: choose 'auto' or 'triton'")
    if impl == "cpu" and (dtype not in cpu.DTYPES or order == 1):
        raise UserError(f"impl is 'cpu', which takes two to four cores of float32, bfloat16 or float16, not {dtype}: choose 'auto'")
    if impl == "triton" and dtype not in cpu.DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UserError(f"impl is 'triton', which computes in float32: give {name} to 'reference'")
    if impl == "triton" and not has_triton:
        raise UserError("impl is 'triton', but triton is not installed: install it (pip install triton) or choose 'auto'")
    if impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("impl is 'triton', which needs a GPU, but the tensors are on cpu: move them there or choose 'auto'")
    return impl


def require_bags_impl(impl: str) -> None:
    """Raise ValueError unless `impl` is "auto" or names an implementation."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise UserError(f"impl is {impl!r}: choose 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")


def check_ids(ids: Tensor, num_rows: int | Tensor, table: str) -> None:
    """Check that a table has the rows a batch asks for.

    On an accelerator the check is asynchronous: the next call that waits for the device fails, without the table's name. Compiled
    models raise a RuntimeError.

    Raises:
        ValueError: naming the table, the id and the limit, if an id is outside [0, num_rows); for a type other than int32 or int64.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise UserError(f"ids of {table} are {ids.dtype}: give int32 or int64")
    if torch.compiler.is_compiling():
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all(), f"an id is out of range for {table}")
        return
    if not ids.numel() or ids.is_meta:
        return
    if ids.device.type != "cpu" or type(ids) is not Tensor:
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
        return
    first, last = (int(extreme) for extreme in ids.aminmax())
    if first < 0 or last >= num_rows:
        id_ = first if first < 0 else last
        raise UserError(f"id {id_} is out of range for {table}: its ids run from 0 to {num_rows - 1}; check the data's vocabulary")


def _require_ascending(offsets: Tensor, plan: LookupPlan | PairPlan) -> None:
    count = plan.num_ids
    if offsets.device.type != "cpu" or type(offsets) is not Tensor:
        return
    if torch.compiler.is_compiling():
        are_valid = (offsets[:1] == 0).all() & (offsets.diff() >= 0).all() & (offsets[-1:] <= count).all()
        torch._assert_async(are_valid, "offsets must ascend from 0 to at most the number of ids")
        return
    if not len(offsets) or int(offsets[0]) or bool((offsets.diff() < 0).any()) or int(offsets[-1]) > count:
        raise UserError(f"offsets must ascend from 0 to at most {count}, the number of ids")
