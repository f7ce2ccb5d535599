"""FBGEMM's operators that TorchRec's jagged tensors call, and lookups, in operators that compiled code may call with any ids.

B rows, K keys, V values, N columns, L the length that rows are padded to.
"""

from collections.abc import Callable
from typing import Any

import fbgemm_gpu  # noqa: F401  registers the operators
import torch
import torch.nn.functional as F
from torch import Tensor


def _to_padded_dense(values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0) -> Tensor:
    """[V, N] or [V], one list of offsets [B + 1] -> [B, L, N] or [B, L]."""
    (starts, ends), (length,) = (offsets[0][:-1], offsets[0][1:]), max_lengths
    index_BL = starts[:, None] + torch.arange(length)
    padded = torch.cat([values, values.new_full((1, *values.shape[1:]), padding_value)])
    rows: Tensor = padded[torch.where(index_BL < ends[:, None], index_BL, values.shape[0])]
    return rows


def permuted(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Select keys of lengths [K, B], values [V] and weights [V] in another order."""
    counts = lengths.sum(1)
    starts, chosen = (counts.cumsum(0) - counts)[permute], counts[permute]
    shift = (starts - chosen.cumsum(0) + chosen).repeat_interleave(chosen, output_size=permuted_lengths_sum)
    index = shift + torch.arange(shift.shape[0])
    return lengths[permute], values[index], None if weights is None else weights[index]


def _offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """[B + 1], V -> the position of each value in its bag, [V]."""
    numbers = torch.arange(range_size)
    return numbers - offsets[torch.searchsorted(offsets, numbers, right=True) - 1]


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Look up rows; NaN for an id out of range, because the error that compiled code raises in a parallel loop ends the process."""
    is_valid = (indices >= 0) & (indices < weight.shape[0])
    missing = torch.nan if weight.is_floating_point() else 0
    return torch.where(is_valid.unsqueeze(-1), weight[torch.where(is_valid, indices, 0)], missing)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.embedding.default: _embedding,
    torch.ops.fbgemm.asynchronous_complete_cumsum.default: lambda t_in: F.pad(t_in.cumsum(0), (1, 0)).to(t_in.dtype),
    torch.ops.fbgemm.jagged_to_padded_dense.default: _to_padded_dense,
    torch.ops.fbgemm.jagged_2d_to_dense.default: lambda values, offsets, max_sequence_length: _to_padded_dense(
        values, [offsets], [max_sequence_length]
    ),
    torch.ops.fbgemm.offsets_range.default: _offsets_range,
    torch.ops.fbgemm.permute_2D_sparse_data.default: permuted,
}
