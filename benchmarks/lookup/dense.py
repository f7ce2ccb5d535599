"""One nn.EmbeddingBag per table with sparse gradients, and the storage that it shares with FBGEMM's tables (`fbgemm.py`).

The tables of a case take gigabytes, so both use the same storage, and a case writes only the rows that its batches use.

Shapes: T tables, M rows of a table, N embedding_dim, B bags, U unique rows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

_kept: dict[tuple[tuple[int, ...], int, str], Tensor] = {}


def shared_storage(rows: tuple[int, ...], dim: int, device: str, *, resident: bool) -> Tensor:
    """Storage [sum of M * N] for tables of one dim, end to end; reused if the sizes are those of the last call.

    Args:
        rows: M of each table.
        dim: N.
        device: device of the storage.
        resident: fill the storage, so that all its pages are resident. Otherwise the first write makes a page resident.
    """
    key = (rows, dim, device)
    if key not in _kept:
        _kept.clear()  # free the old storage first: memory may not hold both
        gc.collect()
        storage = torch.empty(sum(rows) * dim, device=device)
        _kept[key] = storage.fill_(1.0) if resident else storage
    return _kept[key]


def split_storage(storage: Tensor, rows: Sequence[int], dim: int) -> list[Tensor]:
    """Split a storage into its tables: T views [M, N]."""
    return [table.view(-1, dim) for table in storage.split([count * dim for count in rows])]


class Ids(Protocol):
    """The part of a batch that `EmbeddingBags` reads."""

    ids: Sequence[Tensor]
    """T tensors [L]."""
    offsets: Tensor
    """[B + 1], the same for all tables."""


class EmbeddingBags(nn.Module):
    """One nn.EmbeddingBag with sparse gradients for each table, sum pooling.

    Args:
        tables: [M, N] each; shared, not copied.
    """

    def __init__(self, tables: Iterable[Tensor]) -> None:
        super().__init__()
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, made explicit to avoid torch's warning
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True, include_last_offset=True)
            for table in tables
        )

    def forward(self, batch: Ids) -> Tensor:
        """[B, T * N]."""
        return torch.cat([bag(ids, batch.offsets) for bag, ids in zip(self.bags, batch.ids, strict=True)], dim=1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row, for sparse gradients: the update that FBGEMM fuses into its backward pass."""

    def __init__(self, weights: Iterable[nn.Parameter], *, lr: float, eps: float) -> None:
        super().__init__(weights, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight_MN in group["params"]:
                self.state[weight_MN]["sum"] = weight_MN.new_zeros(len(weight_MN))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient."""
        for group in self.param_groups:
            for weight_MN in group["params"]:
                gradient = weight_MN.grad.coalesce()
                ids_U, gradient_UN = gradient.indices()[0], gradient.values()
                sum_M = self.state[weight_MN]["sum"]
                sum_M.index_add_(0, ids_U, gradient_UN.square().mean(1))
                root_U1 = sum_M[ids_U].sqrt_().add_(group["eps"])[:, None]
                # Gathering and copying back is twice as fast as index_add_ on rows.
                weight_MN.index_copy_(0, ids_U, weight_MN[ids_U].addcdiv_(gradient_UN, root_U1, value=-group["lr"]))
