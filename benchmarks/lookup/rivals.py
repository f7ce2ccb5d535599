"""What the lookup is compared with: nn.EmbeddingBag, FBGEMM's fused tables, and TT tables looked up row by row.

Dense tables take gigabytes, so both dense providers use the same storage, and a case writes only the rows that its batches use.

Shapes: T tables, M rows of a table, N embedding_dim, B bags of P ids, L ids and U unique ids of one table; m, n row and column mode
of a core; r, s its two ranks.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.harness.workload import TorchProvider

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM warns about optional lookups that its CPU build lacks
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
    except ImportError:  # the GPU suite also runs without it
        SplitTableBatchedEmbeddingBagsCodegen = None

_kept: dict[tuple[tuple[int, ...], int, str], Tensor] = {}


def draw_ids(rows: int, count: int, exponent: float) -> Tensor:
    """Draw ids [count] of one table by Zipf's law: P(k) is proportional to (k + 1)^-exponent; exponent 0 is uniform."""
    if exponent == 0:
        return torch.randint(rows, (count,))
    cumulative = _cumulative(rows, exponent)
    return torch.searchsorted(cumulative, torch.rand(count, dtype=torch.float64) * cumulative[-1])


@lru_cache(maxsize=7)  # one for each table of a batch
def _cumulative(rows: int, exponent: float) -> Tensor:
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-exponent)
    return torch.cumsum(weights, 0, out=weights)


@dataclass(frozen=True)
class Batch:
    """Bags of one length for every table, built before timing starts."""

    ids: Sequence[Tensor]
    """T tensors [L]."""
    offsets: Tensor
    """[B + 1], the same for all tables."""
    values: Tensor
    """[T * L]: the ids of all tables."""
    all_offsets: Tensor
    """[T * B + 1] of `values`."""

    @classmethod
    def draw(cls, rows: Sequence[int], bags: int, bag: int, exponent: float, device: str) -> Batch:
        """Draw a batch for tables with these numbers of rows."""
        values = torch.cat([draw_ids(count, bags * bag, exponent) for count in rows]).to(device)
        ends = [torch.arange(0, count * bag + 1, bag, device=device) for count in (bags, len(rows) * bags)]
        return cls(values.split(bags * bag), ends[0], values, ends[1])

    @cached_property
    def unique_ids(self) -> list[Tensor]:
        """T tensors [U]: the unique ids of each table, ascending."""
        return [ids.unique() for ids in self.ids]

    def unique_rows(self, tables: Sequence[Tensor]) -> Tensor:
        """Those rows of T tables [M, N], end to end: [sum of U, N]."""
        return torch.cat([table[ids_U] for table, ids_U in zip(tables, self.unique_ids, strict=True)])


def shared_storage(rows: tuple[int, ...], dim: int, device: str) -> Tensor:
    """Resident storage [sum of M * N] for tables of one dim, end to end; reused if the sizes are those of the last call."""
    key = (rows, dim, device)
    if key not in _kept:
        _kept.clear()  # free the old storage first: memory may not hold both
        gc.collect()
        _kept[key] = torch.ones(sum(rows) * dim, device=device)
    return _kept[key]


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

    def forward(self, batch: Batch) -> Tensor:
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


class FbgemmTables(nn.Module):
    """FBGEMM's fused tables with sum pooling and exact row-wise Adagrad, which the backward pass applies.

    Args:
        storage: the storage of all tables, end to end; shared, not copied.
        rows: M of each table.
        dim: N.
        lr, eps: of Adagrad.
    """

    def __init__(self, storage: Tensor, rows: Sequence[int], dim: int, *, lr: float, eps: float) -> None:
        super().__init__()
        on_gpu = storage.is_cuda
        placement = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.bags: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, dim, *placement) for count in rows],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=eps,
            **({} if on_gpu else {"preallocated_host_buffers": {"weights": storage}}),
        )
        if on_gpu:
            self.bags.weights_dev.data = storage

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Look up ids [T * L], table after table, with offsets [T * B + 1]; returns [B, T * N]."""
        output: Tensor = self.bags(values, offsets)
        return output


class FusedProvider(TorchProvider):
    """A module whose backward pass updates it, so there is "forward" and "step", but no "forward+backward"."""

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self._forward, "step": self._forward_backward}


def chain_rows(cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Look up rows [L, N] of a TT table, each gathering its slice of every core; cores are (m, r, n, s), one slice per digit.

    This is the unoptimized TTM embedding that CoMERA (section 4.1, arXiv 2405.14377) and others compare with: rows share no slices
    or products. Time and memory are proportional to rows times slices.
    """
    radices = [len(core) for core in cores]
    slices = [core_mrns.index_select(0, ids // math.prod(radices[k + 1 :]) % radices[k]) for k, core_mrns in enumerate(cores)]
    rows_Lns = slices[0].flatten(1, 2)  # r is 1
    for slice_Lrns in slices[1:]:
        rows_Lns = rows_Lns.bmm(slice_Lrns.flatten(2)).view(len(ids), -1, slice_Lrns.shape[3])
    return rows_Lns.flatten(1)


def rows_of(bag: cr.TTEmbeddingBag, ids: Tensor) -> Tensor:
    """Look up rows [L, N] of a table by definition, G_1 diag(D_1) G_2 ...; differentiable in its parameters."""
    first, *others = (core.transpose(0, 1) for core in bag.cores())
    scaled = [rank[:, :, None] * core for rank, core in zip(bag.rank_parameters(), others, strict=True)]
    return chain_rows([first, *scaled], ids)[:, : bag.embedding_dim]


class ChainedTables(nn.Module):
    """Sum-pooled bags of one length over TT tables, one chain per table.

    Args:
        tables: name -> cores (m, r, n, s); copied.
        bag: P.
        dedup: chain only the unique ids of each table, instead of all lookups.
    """

    def __init__(self, tables: dict[str, list[Tensor]], bag: int, *, dedup: bool) -> None:
        super().__init__()
        self._bag, self._dedup = bag, dedup
        copies = {name: {f"core_{k}": core.detach().clone() for k, core in enumerate(cores)} for name, cores in tables.items()}
        self.tables = nn.ModuleDict({name: nn.ParameterDict(cores) for name, cores in copies.items()})

    def forward(self, batch: Batch) -> Tensor:
        """[B, T * N]."""
        pooled = [self._pool(list(cores.parameters()), ids) for cores, ids in zip(self.tables.values(), batch.ids, strict=True)]
        return torch.cat(pooled, dim=1)

    def _pool(self, cores: Sequence[Tensor], ids: Tensor) -> Tensor:
        ids, inverse = ids.unique(return_inverse=True) if self._dedup else (ids, None)
        rows_LN = chain_rows(cores, ids)
        rows_LN = rows_LN if inverse is None else rows_LN.index_select(0, inverse)
        return rows_LN if self._bag == 1 else rows_LN.unflatten(0, (-1, self._bag)).sum(1)
