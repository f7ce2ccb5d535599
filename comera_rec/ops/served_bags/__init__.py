"""Bags of rows for requests: every table of a model in one call, without a plan."""

import torch
from torch import Tensor

from comera_rec.ops.native import ops
from comera_rec.ops.served_bags.served_table import ServedTable, Slab
from comera_rec.ops.served_bags.storage import DTYPES, Packed, least_type, pack, quantize


def served_bags(
    packed: Packed,
    values: Tensor,
    lengths: Tensor,
    columns: int,
    *,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the bags of F features of each sample, [B, F, N], or [bags, N] if `counts` are given.

    Every id's row is formed separately, in registers, because requests are too small for a plan to pay off. There is no gradient.

    Args:
        packed: from `pack`.
        values: [V] int64, ids feature by feature; those beyond the last bag are ignored.
        lengths: [F * B] int64, ids of each bag, feature by feature.
        columns: N, of all tables.
        counts: [F] int64, bags of each feature, if they differ; `lengths` is [bags] then, and bags beyond all features' are 0.
        weights: [V] float32, factors of rows.

    Raises:
        ValueError: naming the feature, the id and the limit, if an id is out of range; for lengths below 0 or too large.
    """
    bags: Tensor = ops.served_bags(*packed, values, lengths, counts, weights, columns)
    return bags


@torch.library.register_fake("comera_rec::served_bags")
def _(storage, layout, slabs, values, lengths, counts, weights, columns):  # type: ignore[no-untyped-def]
    sizes = (lengths.shape[0] // layout.shape[0], layout.shape[0]) if counts is None else lengths.shape
    return values.new_empty(*sizes, columns, dtype=torch.float32)


__all__ = ["DTYPES", "Packed", "ServedTable", "Slab", "least_type", "pack", "quantize", "served_bags"]
