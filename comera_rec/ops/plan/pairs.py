"""The plan of a lookup on GPUs: the two slices whose product is the row of each id, and the ids sorted by each.

The halves of tables of order 3 and 4 count as single cores, whose slices are products. L ids, T tables, P leading and Q trailing
slices of all tables. A GPU multiplies faster than it finds unique rows, so a row is formed for every id. Sizes depend only on
shapes, and nothing waits for the device.
"""

import importlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from comera_rec.ops.derivatives import in_plain_torch
from comera_rec.ops.launch import ceil_div
from comera_rec.ops.plan.reference import first_keys, kept, on_device
from data_pipeline.errors import UserError

MOST_IDS = 1 << 29
"""Kernels number ids and parts in 32 bits."""
UNSAFE = (torch.Tag.cudagraph_unsafe,)
"""Graphs that torch.compile captures can't have operators that copy constants from the host."""


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """The slices whose products are the rows of ids; they depend only on ids and row modes."""

    pairs: Tensor
    """[3, L] int32: for each id its leading and its trailing slice, numbered within its table (-1 if left out), and the table."""
    slices: Tensor
    """[2, L], sorted: leading slices numbered through all tables, P if left out; then trailing slices, numbered from P + 1 on."""
    order: Tensor
    """[2, L]: position of each of `slices` before sorting; those of trailing slices count from L."""
    counts: tuple[int, int]
    """P and Q."""

    @property
    def num_ids(self) -> int:
        """L."""
        return self.pairs.shape[1]


def plan_pairs(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]], rows: Sequence[int]) -> PairPlan:
    """Plan a lookup over several tables with one kernel for all of them, and one sort.

    The device checks ids: if one is out of range, it says so on stderr, and the next call that waits for it fails.

    Args:
        ids: 1-D row ids of each table.
        row_shapes: row modes of each table.
        rows: number of rows of each table.
    """
    starts = _starts([table.shape[0] for table in ids], ids[0].device)
    return plan_pairs_of_bags(_join(ids), starts, 1, [1] * len(ids), row_shapes, rows)


def plan_pairs_of_bags(
    ids: Tensor,
    offsets: Tensor,
    bags_of_feature: int,
    features: Sequence[int],
    row_shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
) -> PairPlan:
    """Plan a lookup whose ids lie one after the other, feature by feature; how many a feature has is known to the device alone.

    Args:
        ids: [L] row ids of all tables, int32 or int64; those beyond the last bag are left out.
        offsets: [F * bags_of_feature + 1] starts of bags.
        bags_of_feature: number of bags of each feature.
        features: number of features of each table.
        row_shapes: row modes of each table.
        rows: number of rows of each table.

    Raises:
        ValueError: for ids of another type.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise UserError(f"ids are {ids.dtype}: give int32 or int64")
    cut = (len(row_shapes[0]) + 1) // 2
    modes = [math.prod(half) for shape in row_shapes for half in (shape[:cut], shape[cut:])]
    plan = _plan_pairs if is_transformed() else split_and_sort
    pairs, slices, order = plan(ids.contiguous(), offsets.contiguous(), bags_of_feature, list(features), modes, list(rows))
    return PairPlan(pairs=pairs, slices=slices, order=order, counts=(sum(modes[::2]), sum(modes[1::2])))


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of the first id of each table, and of all ids."""
    starts = tuple(first_keys(lengths))
    if device.type != "cuda" or is_transformed():
        return torch.tensor(starts, device=device)
    if len(set(lengths)) == 1:
        return torch.arange(len(starts), device=device) * lengths[0]
    return kept(_kept_starts(starts, device))


@lru_cache(maxsize=64)  # a graph's capture finds those of the steps before it
def _kept_starts(starts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(starts).to(device, non_blocking=True)


def is_transformed() -> bool:
    """Return whether a tracer or transform is active: it sees only registered operators, which take longer to call than kernels."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or in_plain_torch()


def _join(ids: Sequence[Tensor]) -> Tensor:
    """Concatenate ids; without a copy if they are neighbors in memory, as those of a KeyedJaggedTensor are."""
    if len(ids) == 1:
        return ids[0].contiguous()
    if torch.compiler.is_compiling():
        return torch.cat(list(ids))
    whole, beyond = ids[0]._base, ids[0].storage_offset()
    if whole is not None:
        for table in ids:
            if table._base is not whole or table.storage_offset() != beyond or not table.is_contiguous():
                break
            beyond += len(table)
        else:
            return ids[0].as_strided((beyond - ids[0].storage_offset(),), (1,))
    return torch.cat(list(ids))


@torch.library.custom_op("comera_rec::plan_pairs", mutates_args=(), tags=UNSAFE)
def _plan_pairs(
    ids: Tensor, offsets: Tensor, bags_of_feature: int, features: list[int], modes: list[int], rows: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return split_and_sort(ids, offsets, bags_of_feature, features, modes, rows)


def split_and_sort(
    ids: Tensor, offsets: Tensor, bags_of_feature: int, features: Sequence[int], modes: Sequence[int], rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs, slices and order, for the arguments of `plan_pairs_of_bags`, and modes [2 T]."""
    _require_few(len(ids))
    columns, num_left, num_right, num_features = _columns(tuple(features), tuple(modes), tuple(rows))
    pairs = ids.new_empty(3, len(ids), dtype=torch.int32)
    keys = ids.new_empty(2, len(ids), dtype=key_type(num_left, num_right))
    if len(ids):
        kernels = importlib.import_module("comera_rec.ops.plan.triton")  # needs triton to be installed
        kernels.split_kernel(len(rows))(
            (ceil_div(len(ids), kernels.IDS),),
            ids_ptr=ids, tables_ptr=on_device(columns, ids.device), offsets_ptr=offsets, pairs_ptr=pairs, keys_ptr=keys,
            num_ids=len(ids), num_features=num_features, bags_of_feature=bags_of_feature, num_left=num_left, num_right=num_right,
        )  # fmt: skip
    return pairs, *sort_keys(keys)


@lru_cache(maxsize=64)
def _columns(features: tuple[int, ...], modes: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Any, int, int, int]:
    """Return what the kernel reads about each table, and the numbers of leading slices, trailing slices and features."""
    leading, trailing = modes[::2], modes[1::2]
    firsts = first_keys(leading), first_keys(trailing), first_keys(features)
    num_left, num_right, num_features = (first[-1] for first in firsts)
    return tuple(zip(rows, trailing, *firsts, strict=False)), num_left, num_right, num_features


@_plan_pairs.register_fake
def _(
    ids: Tensor, offsets: Tensor, bags_of_feature: int, features: list[int], modes: list[int], rows: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    keys = ids.new_empty(2, len(ids), dtype=key_type(sum(modes[::2]), sum(modes[1::2])))
    return ids.new_empty(3, len(ids), dtype=torch.int32), keys, torch.empty_like(keys, dtype=torch.int64)


def plan_hot_rows(pairs: Tensor, trailing: Sequence[int], first_rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> PairPlan:
    """Plan a lookup of hot rows: a leading slice is a row of a block's A, a trailing one is the block's P.

    Ids without hot rows are left out.

    Args:
        pairs: [3, L]: for each id two numbers p and q, and its table; the id is p * trailing + q.
        trailing: the factor of each table.
        first_rows: the row that id 0 refers to, of each table.
        blocks: the numbers of rows of each table's blocks.
    """
    sizes = [list(trailing), list(first_rows), [len(table) for table in blocks], [count for table in blocks for count in table]]
    plan = _plan_hot_rows if is_transformed() else split_and_sort_hot_rows
    hot_pairs, slices, order = plan(pairs, *sizes)
    return PairPlan(pairs=hot_pairs, slices=slices, order=order, counts=(sum(sizes[-1]), len(sizes[-1])))


@torch.library.custom_op("comera_rec::plan_hot_rows", mutates_args=(), tags=UNSAFE)
def _plan_hot_rows(
    pairs: Tensor, trailing: list[int], first_rows: list[int], blocks: list[int], rows: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return split_and_sort_hot_rows(pairs, trailing, first_rows, blocks, rows)


def split_and_sort_hot_rows(
    pairs: Tensor, trailing: Sequence[int], first_rows: Sequence[int], blocks: Sequence[int], rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs, slices and order of hot rows; `blocks` is each table's number of blocks, `rows` each block's of rows."""
    first_blocks, firsts = first_keys(blocks), first_keys(rows)
    hot_pairs = torch.empty_like(pairs, dtype=torch.int32)
    keys = pairs.new_empty(2, pairs.shape[1], dtype=key_type(firsts[-1], len(rows)))
    if keys.numel():
        first_hot = [firsts[block] for block in first_blocks]
        sums = [beyond - first for first, beyond in pairwise(first_hot)]
        columns = zip(trailing, first_rows, sums, first_hot, first_blocks, strict=False)
        kernels = importlib.import_module("comera_rec.ops.plan.triton")
        kernels.hot_kernel(max(blocks))(
            (ceil_div(pairs.shape[1], kernels.IDS),),
            pairs_ptr=pairs, tables_ptr=on_device(list(columns), pairs.device),
            firsts_ptr=on_device([firsts], pairs.device), hot_pairs_ptr=hot_pairs, keys_ptr=keys,
            num_ids=pairs.shape[1], num_rows=firsts[-1], num_blocks=len(rows),
        )  # fmt: skip
    return hot_pairs, *sort_keys(keys)


@_plan_hot_rows.register_fake
def _(
    pairs: Tensor, trailing: list[int], first_rows: list[int], blocks: list[int], rows: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    keys = pairs.new_empty(2, pairs.shape[1], dtype=key_type(sum(rows), len(rows)))
    return torch.empty_like(pairs, dtype=torch.int32), keys, torch.empty_like(keys, dtype=torch.int64)


def plan_all_rows(modes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[PairPlan, Tensor]:
    """Plan a lookup of all rows of tables with two row modes, each row in a bag; also return the bags' starts.

    It is the same in every step, so it is kept; forever where a graph that is being captured reads it.
    """
    if is_transformed():
        return _plan_all_rows(modes, device)
    on_gpu = device.type == "cuda"
    with _LOCK:
        found = _ALL_ROWS.pop((modes, device), None)
        if found is None:
            with torch.inference_mode(False):  # or training couldn't use it after an evaluation
                found = _plan_all_rows(modes, device)
            if on_gpu and torch.cuda.is_current_stream_capturing():
                return found  # which isn't filled before the graph is replayed
            if on_gpu:  # other streams may read it next
                torch.cuda.current_stream(device).synchronize()
        _ALL_ROWS[modes, device] = found  # the last one used is the last
        if len(_ALL_ROWS) > _MOST_KEPT:
            del _ALL_ROWS[next(iter(_ALL_ROWS))]
    plan, ends = found
    for tensor in (plan.pairs, plan.slices, plan.order, ends):
        kept(tensor)
    return found


def _plan_all_rows(modes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[PairPlan, Tensor]:
    counts = [m * n for m, n in modes]
    if sum(counts) >= MOST_IDS:
        raise UserError(f"a half of these tables has {sum(counts):,} products of slices: choose row modes that differ less")
    ids = [torch.arange(count, device=device) for count in counts]
    return plan_pairs(ids, modes, counts), torch.arange(sum(counts) + 1, device=device)


_ALL_ROWS: dict[tuple[Any, torch.device], tuple[PairPlan, Tensor]] = {}
_LOCK, _MOST_KEPT = threading.Lock(), 256


def _require_few(num_ids: int) -> None:
    if num_ids >= MOST_IDS:
        raise UserError(f"a lookup on a GPU takes fewer than {MOST_IDS:,} ids, not {num_ids:,}: split the batch")


def sort_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort keys [2, L] in one go, which sorts each half, because keys of the second half are larger."""
    slices, order = torch.sort(keys.flatten(), stable=True)
    return slices.view(keys.shape), order.view(keys.shape)


def key_type(num_left: int, num_right: int) -> torch.dtype:
    """Return the smallest type that holds the keys, because a radix sort takes one pass per byte."""
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if num_left + num_right + 1 <= torch.iinfo(dtype).max)
