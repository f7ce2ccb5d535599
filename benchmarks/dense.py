"""The dense rivals: FBGEMM's table batched embedding bag, and one nn.EmbeddingBag a table with sparse gradients.

The tables of a case take gigabytes, so both hold the same storage, and a case writes only the rows that its batches meet.

Shapes: T tables, M rows of a table, N embedding_dim, B bags, U unique rows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.batch import Batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of optional lookups that the CPU build leaves out
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

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

    def forward(self, batch: Batch) -> Tensor:
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


class FbgemmProvider:
    """FBGEMM's fused tables with sum pooling and exact row-wise Adagrad.

    The backward pass updates the rows at once: it has "forward" and "step", and no "forward+backward".

    Args:
        storage: of all tables, end to end; shared, not copied.
        rows: M of each table.
        dim: N.
        batches: taken in turns.
        upstream: [B, T * N] gradient of the output.
        lr, eps: of Adagrad.
    """

    def __init__(
        self,
        storage: Tensor,
        rows: Sequence[int],
        dim: int,
        batches: Sequence[Batch],
        upstream: Tensor,
        *,
        lr: float,
        eps: float,
    ) -> None:
        on_gpu = storage.is_cuda
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, dim, *place) for count in rows],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=eps,
            preallocated_host_buffers=None if on_gpu else {"weights": storage},
        )
        if on_gpu:
            self._bags.weights_dev.data = storage
        self._batches = batches
        self._upstream = upstream

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self._forward, "step": self._step}

    def verify(self) -> dict[str, Tensor]:
        output = self._step(0).detach()
        return {"output": output, "rows after Adagrad": self._batches[0].met_rows(self._bags.split_embedding_weights())}

    def release(self) -> None:
        """Nothing is left behind."""

    def _forward(self, turn: int) -> Tensor:
        with torch.no_grad():
            return self._pool(turn)

    def _step(self, turn: int) -> Tensor:
        output = self._pool(turn)
        output.backward(self._upstream)
        return output

    def _pool(self, turn: int) -> Tensor:
        features = self._batches[turn % len(self._batches)].features
        output: Tensor = self._bags(features.values(), features.offsets())
        return output
