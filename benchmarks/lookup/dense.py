"""One nn.EmbeddingBag a table with sparse gradients, and the storage that it shares with FBGEMM's tables (`fbgemm.py`).

The tables of a case take gigabytes, so both hold the same storage, and a case writes only the rows that its batches meet.

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
    """Room for tables of one dim, end to end: [sum of M x N], the same as last time if the sizes are the same.

    Args:
        rows: M of each table.
        dim: N.
        device: where.
        resident: fill the storage, so that every page of it is real memory. Otherwise pages come with the first write to them.
    """
    key = (rows, dim, device)
    if key not in _kept:
        _kept.clear()  # before the new one exists: memory may not hold both
        gc.collect()
        storage = torch.empty(sum(rows) * dim, device=device)
        _kept[key] = storage.fill_(1.0) if resident else storage
    return _kept[key]


def split_storage(storage: Tensor, rows: Sequence[int], dim: int) -> list[Tensor]:
    """The tables in a storage: T views [M, N]."""
    return [table.view(-1, dim) for table in storage.split([count * dim for count in rows])]


class Ids(Protocol):
    """What the rival reads of a batch."""

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
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: torch warns of it otherwise
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True, include_last_offset=True)
            for table in tables
        )

    def forward(self, batch: Ids) -> Tensor:
        """[B, T * N]."""
        return torch.cat([bag(ids, batch.offsets) for bag, ids in zip(self.bags, batch.ids, strict=True)], dim=1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row, for sparse gradients: the update that FBGEMM fuses into its backward pass."""

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
                met_U, gradient_UN = gradient.indices()[0], gradient.values()
                sum_M = self.state[weight_MN]["sum"]
                sum_M.index_add_(0, met_U, gradient_UN.square().mean(1))
                root_U1 = sum_M[met_U].sqrt_().add_(group["eps"])[:, None]
                # A gather and a copy back: twice as fast as index_add_ on rows.
                weight_MN.index_copy_(0, met_U, weight_MN[met_U].addcdiv_(gradient_UN, root_U1, value=-group["lr"]))
