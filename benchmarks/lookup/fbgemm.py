"""FBGEMM's table batched embedding bag as a provider."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns about optional lookups that the CPU build lacks
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen


class FbgemmProvider:
    """FBGEMM's fused tables with sum pooling and exact row-wise Adagrad.

    The backward pass updates the rows, so there is "forward" and "step", but no "forward+backward".

    Args:
        storage: the storage of all tables, end to end; shared, not copied.
        rows: M of each table.
        dim: N.
        batches: used in turns; each has `features`, with values and offsets, and `unique_rows`.
        upstream: [B, T * N] gradient of the output.
        lr, eps: of Adagrad.
    """

    def __init__(
        self,
        storage: Tensor,
        rows: Sequence[int],
        dim: int,
        batches: Sequence[Any],
        upstream: Tensor,
        *,
        lr: float,
        eps: float,
    ) -> None:
        on_gpu = storage.is_cuda
        placement = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, dim, *placement) for count in rows],
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
        return {"output": output, "rows after Adagrad": self._batches[0].unique_rows(self._bags.split_embedding_weights())}

    def release(self) -> None:
        """Do nothing: calls leave nothing behind."""

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
