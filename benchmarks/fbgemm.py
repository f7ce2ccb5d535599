"""FBGEMM's table batched embedding bag: the backward pass updates the rows at once, by row-wise Adagrad."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of optional lookups that the CPU build leaves out
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen


class FbgemmProvider:
    """One table with sum pooling. There is no "forward+backward" without the update, so it has "forward" and "step".

    Args:
        table: [M, N] weights; copied.
        batches: (ids, offsets) each, taken in turns.
        upstream: [B, N] gradient of the output.
        learning_rate, eps: of row-wise Adagrad.
    """

    def __init__(
        self, table: Tensor, batches: Sequence[tuple[Tensor, Tensor]], upstream: Tensor, *, learning_rate: float, eps: float
    ) -> None:
        on_gpu = table.is_cuda
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(*table.shape, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=learning_rate,
            eps=eps,
        )
        self._bags.split_embedding_weights()[0].copy_(table)
        self._batches = batches
        self._upstream = upstream

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self._forward, "step": self._step}

    def verify(self) -> dict[str, Tensor]:
        met = self._batches[0][0].unique()
        output = self._step(0).detach()
        return {"output": output, "rows after Adagrad": self._bags.split_embedding_weights()[0][met]}

    def release(self) -> None:
        """Nothing is left behind."""

    def _forward(self, turn: int) -> Tensor:
        with torch.no_grad():
            output: Tensor = self._bags(*self._batches[turn % len(self._batches)])
        return output

    def _step(self, turn: int) -> Tensor:
        output: Tensor = self._bags(*self._batches[turn % len(self._batches)])
        output.backward(self._upstream)
        return output
