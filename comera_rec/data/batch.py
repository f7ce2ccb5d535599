"""A batch: the tensors that a model is called with.

B rows, L labels, I integer columns, C categorical columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass(frozen=True, kw_only=True)
class Batch(Pipelineable):
    """Rows of a data set.

    dense: [B, I] float32, the transformed integer columns in the manifest's order.
    sparse: int64 ids by categorical column (key), one per row or, in columns of lists, any number; has lengths and offsets.
    labels: [B] float32, 0 or 1; [B, L] where the data set has several labels, in the order of `Manifest.labels`.
    weights: [B] float32 of at least 0, factors of the rows' losses; None where the data set has none.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device: itself if it is there already."""
        device = torch.device(device)
        return self if self.dense.device == device else self._with_tensors(lambda part: part.to(device, non_blocking=non_blocking))

    def padded(self, rows: int) -> "Batch":
        """Return the batch padded to a number of rows; added rows have zeros, no ids, label 0 and weight 0."""
        missing = rows - len(self)
        if not missing:
            return self
        lengths = F.pad(self.sparse.lengths().view(len(self.sparse.keys()), len(self)), (0, missing)).flatten()
        return Batch(
            dense=F.pad(self.dense, (0, 0, 0, missing)),
            sparse=KeyedJaggedTensor(self.sparse.keys(), self.sparse.values(), lengths=lengths),
            labels=F.pad(self.labels, (*[0, 0] * (self.labels.dim() - 1), 0, missing)),
            weights=None if self.weights is None else F.pad(self.weights, (0, missing)),
        )

    def pin_memory(self) -> "Batch":
        return self._with_tensors(lambda part: part.pin_memory())

    def _with_tensors(self, change: Callable[[Any], Any]) -> "Batch":
        """Return the batch with every tensor changed; lengths and offsets of one id per row, which all batches share, are found."""
        sparse, weights = self.sparse, None if self.weights is None else change(self.weights)
        if has_one_per_row(sparse):
            keys, rows, values = len(sparse.keys()), sparse.stride(), change(sparse.values())
            sparse = keyed_rows(sparse.keys(), values, *one_per_row(keys, rows, values.device), rows, [rows] * keys)
        else:
            sparse = change(sparse)
        return Batch(dense=change(self.dense), sparse=sparse, labels=change(self.labels), weights=weights)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream is done with it, for torchrec's train pipelines."""
        for part in (self.dense, self.sparse, self.labels, self.weights):
            if part is not None:
                part.record_stream(stream)


@lru_cache(maxsize=8)
def one_per_row(keys: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths and offsets of a KeyedJaggedTensor with one id per row and key; batches share them, nothing writes to them."""
    with torch.inference_mode(False):  # or training couldn't use them after an evaluation
        made = torch.ones(keys * rows, dtype=torch.int64, device=device), torch.arange(keys * rows + 1, device=device)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():  # other streams may read them next
        torch.cuda.current_stream(device).synchronize()
    return made


def has_one_per_row(sparse: KeyedJaggedTensor) -> bool:
    """Return whether lengths and offsets are those of `one_per_row`, which nothing may write to."""
    return sparse.lengths() is one_per_row(len(sparse.keys()), sparse.stride(), sparse.device())[0]


def keyed_rows(
    keys: list[str], values: Tensor, lengths: Tensor, offsets: Tensor, rows: int, counts: list[int]
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor that has nothing left to compute; `counts` are the numbers of ids of each key."""
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        offsets=offsets,
        stride=rows,
        length_per_key=counts,
        offset_per_key=[0, *accumulate(counts)],
    )
