"""Embedding bags: dense tables, FBGEMM's fused table, and the same table as a tensor train with and without dedup.

All providers of a case hold the same table: the dense ones hold what the train contracts to. Every pass takes the next of several
batches, the same one for all, so that no provider profits from rows that the last call left in the caches.

Shapes: M num_embeddings, N embedding_dim, B bags, L ids, U unique ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_rec as cr
from benchmarks.fbgemm import FbgemmProvider
from benchmarks.linear import tt_matrix
from benchmarks.measure import Settings, measure_cases
from benchmarks.rows import Row
from benchmarks.unoptimized import UnoptimizedTTM
from benchmarks.workload import Provider, TorchProvider, parameter_count, parameter_gradients

ZIPF_EXPONENT = 1.05
NUM_BATCHES = 8
LEARNING_RATE = 0.01
EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class LookupCase:
    """One table and its batches: `batch` bags of `bag` ids, drawn uniformly or by Zipf's law (id 0 most often)."""

    num_embeddings: int
    embedding_dim: int
    order: int
    rank: int
    batch: int
    bag: int
    ids: str
    dtype: str = "float32"

    @property
    def tt_shape(self) -> cr.TTShape:
        """Modes and ranks of the table."""
        return cr.TTShape.for_table(self.num_embeddings, self.embedding_dim, tt_ranks=self.rank, order=self.order)

    def shapes(self) -> dict[str, Any]:
        return {
            "rows": self.num_embeddings,
            "dim": self.embedding_dim,
            "order": self.order,
            "ranks": list(self.tt_shape.ranks),
            "batch": self.batch,
            "bag": self.bag,
            "ids": f"zipf {ZIPF_EXPONENT}" if self.ids == "zipf" else self.ids,
        }


def cases(quick: bool) -> list[LookupCase]:
    """Every combination of order, batch, bag length and distribution; order 2 outermost."""
    rows, dim, rank = (100_000, 16, 8) if quick else (1_000_000, 64, 16)
    return [
        LookupCase(num_embeddings=rows, embedding_dim=dim, order=order, rank=rank, batch=batch, bag=bag, ids=ids)
        for order in (2, 3, 4)
        for batch in ((2048,) if quick else (2048, 16384))
        for bag in ((10,) if quick else (1, 10))
        for ids in (("zipf",) if quick else ("zipf", "uniform"))
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of every case."""
    yield from measure_cases("lookup", cases(settings.quick), LookupWorkload, settings)


class LookupWorkload:
    """A table in every form, its batches and the upstream gradient."""

    baselines = ("nn.EmbeddingBag", "FBGEMM fused", "unoptimized TTM")

    def __init__(self, case: LookupCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.device = device
        self.tensor_train = cr.TTEmbeddingBag(
            case.num_embeddings,
            case.embedding_dim,
            shape=case.tt_shape,
            include_last_offset=True,
            device=device,
            dtype=getattr(torch, case.dtype),
        )
        offsets = torch.arange(0, case.batch * case.bag + 1, case.bag, device=device)
        self.batches = [(draw_ids(case).to(device), offsets) for _ in range(NUM_BATCHES)]
        self.upstream_BN = torch.randn(case.batch, case.embedding_dim).to(device, getattr(torch, case.dtype))

    @cached_property
    def table(self) -> Tensor:
        """The dense table, [M, N]."""
        stored = {name: parameter.detach() for name, parameter in self.tensor_train.named_parameters()}
        return self._rows(tt_matrix(stored, self.tensor_train.shape)).contiguous()

    @property
    def providers(self) -> Mapping[str, Callable[[], Provider]]:
        return {
            "nn.EmbeddingBag": lambda: self._dense(sparse=False),
            "nn.EmbeddingBag sparse": lambda: self._dense(sparse=True),
            "FBGEMM fused": lambda: FbgemmProvider(
                self.table, self.batches, self.upstream_BN, learning_rate=LEARNING_RATE, eps=EPS
            ),
            "unoptimized TTM": lambda: self._tensor_train(
                UnoptimizedTTM([self.tensor_train.get_parameter(f"core_{k}") for k in range(self.case.order)], self.case.bag)
            ),
            "TTEmbeddingBag": lambda: self._tensor_train(copy.deepcopy(self.tensor_train)),
        }

    def reference(self) -> dict[str, Tensor]:
        """Bags over the table contracted core by core, in float64; gradients of the rows that the batch meets, U."""
        stored = {name: p.detach().double().requires_grad_() for name, p in self.tensor_train.named_parameters()}
        table_MN = self._rows(tt_matrix(stored, self.tensor_train.shape))
        table_MN.retain_grad()
        ids, offsets = self.batches[0]
        output_BN = F.embedding_bag(ids, table_MN, offsets, mode="sum", include_last_offset=True)
        output_BN.backward(self.upstream_BN.double())
        assert table_MN.grad is not None
        met = ids.unique()
        gradient_UN = table_MN.grad[met]
        step_U1 = LEARNING_RATE / (gradient_UN.square().mean(1, keepdim=True).sqrt() + EPS)
        return {
            "output": output_BN.detach(),
            "gradient of rows": gradient_UN,
            "rows after Adagrad": table_MN.detach()[met] - step_U1 * gradient_UN,
            **{f"gradient of {name}": tensor.grad for name, tensor in stored.items() if tensor.grad is not None},
        }

    def counted(self, provider: Provider, pass_: str) -> dict[str, float]:
        """Parameters, and unique ids of the first batch."""
        module = provider.module if isinstance(provider, TorchProvider) else None
        params = float(self.case.num_embeddings * self.case.embedding_dim) if module is None else parameter_count(module)
        return {"params": params, "unique_ids": float(len(self.batches[0][0].unique()))}

    def _rows(self, matrix: Tensor) -> Tensor:
        return matrix[: self.case.num_embeddings, : self.case.embedding_dim]

    def _dense(self, *, sparse: bool) -> TorchProvider:
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: torch warns of it otherwise
        module = nn.EmbeddingBag.from_pretrained(
            self.table.clone(), freeze=False, mode="sum", sparse=sparse, include_last_offset=True
        )

        def gradients() -> dict[str, Tensor]:
            gradient = module.weight.grad
            assert gradient is not None
            return {"gradient of rows": (gradient.to_dense() if sparse else gradient)[self.batches[0][0].unique()]}

        return TorchProvider(module, self.batches, self.upstream_BN, optimizer=_adagrad(module), gradients=gradients)

    def _tensor_train(self, module: nn.Module) -> TorchProvider:
        def gradients() -> dict[str, Tensor]:
            return parameter_gradients(module)

        return TorchProvider(module, self.batches, self.upstream_BN, optimizer=_adagrad(module), gradients=gradients)


def draw_ids(case: LookupCase) -> Tensor:
    """Ids of one batch, [L]."""
    count = case.batch * case.bag
    if case.ids == "uniform":
        return torch.randint(case.num_embeddings, (count,))
    if case.ids == "zipf":
        cumulative = torch.arange(1, case.num_embeddings + 1, dtype=torch.float64).pow(-ZIPF_EXPONENT).cumsum(0)
        return torch.searchsorted(cumulative, torch.rand(count, dtype=torch.float64) * cumulative[-1])
    raise ValueError(f"ids is {case.ids!r}: choose 'uniform' or 'zipf'")


def _adagrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters(), lr=LEARNING_RATE, eps=EPS)
