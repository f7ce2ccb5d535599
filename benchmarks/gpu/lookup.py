"""The lookup on a GPU without TorchRec: dense tables, FBGEMM's if installed, and TT tables, eager and in a CUDA graph.

Shapes: T tables of N columns, B bags of one id each, L ids in all tables together, U unique ids.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.ids import draw_ids
from benchmarks.harness.limits import Least
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Provider, TorchProvider, parameter_count, parameter_gradients
from benchmarks.lookup.dense import EmbeddingBags, RowWiseAdagrad, shared_storage, split_storage
from comera_rec.nn import TTEmbeddingBag
from comera_rec.nn.tt_table import plan_tables
from comera_rec.ops import tt_bags
from comera_rec.tt import TTShape

ROWS = (10131227, 2202608, 8351593, 5461306, 7046547, 286181, 142572)  # Criteo Kaggle's tables above 100,000 rows
ZIPF, NUM_BATCHES, LR, EPS = 1.05, 4, 0.01, 1e-8
DENSE, FBGEMM, TT, GRAPH = "nn.EmbeddingBag sparse", "FBGEMM", "TT tables", "TT tables, CUDA graph"


@dataclass(frozen=True, kw_only=True)
class GpuLookupCase:
    """Tables of one dim, and batches of `batch` bags of one id each, drawn by Zipf's law."""

    batch: int
    rows: tuple[int, ...] = ROWS
    dim: int = 64
    order: int = 2
    rank: int = 16
    dtype: str = "float32"

    @property
    def tt_shapes(self) -> list[TTShape]:
        """Modes and ranks of each table."""
        return [TTShape.for_table(count, self.dim, tt_ranks=self.rank, order=self.order) for count in self.rows]

    def shapes(self) -> dict[str, Any]:
        return {
            "tables": len(self.rows), "rows": sum(self.rows), "dim": self.dim, "order": self.order, "rank": self.rank,
            "batch": self.batch,
        }  # fmt: skip


def cases(quick: bool) -> list[GpuLookupCase]:
    """The batches and dims of the goals; order 3 once."""
    if quick:
        return [GpuLookupCase(rows=(30_000, 10_000), dim=16, rank=8, batch=256)]
    grid = [GpuLookupCase(dim=dim, batch=batch) for dim in (64, 128) for batch in (16_384, 65_536)]
    return [*grid, GpuLookupCase(order=3, batch=16_384)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case."""
    yield from measure_cases("gpu-lookup", cases(settings.quick), GpuLookupWorkload, settings)


@dataclass(frozen=True)
class Flat:
    """A batch of all tables, in the form that FBGEMM reads."""

    all_ids: Tensor
    all_offsets: Tensor

    def values(self) -> Tensor:
        """[L]."""
        return self.all_ids

    def offsets(self) -> Tensor:
        """[T * B + 1]."""
        return self.all_offsets


class FlatBatch:
    """One id per bag, for tables with these numbers of rows."""

    def __init__(self, rows: Sequence[int], batch: int, device: str) -> None:
        values = torch.cat([draw_ids(count, batch, ZIPF) for count in rows]).to(device)
        self.ids = values.split(batch)
        self.offsets = torch.arange(batch + 1, device=device)
        self.features = Flat(values, torch.arange(len(values) + 1, device=device))

    @cached_property
    def unique_ids(self) -> list[Tensor]:
        """The unique ids of each table, ascending."""
        return [ids.unique() for ids in self.ids]

    def unique_rows(self, tables: Sequence[Tensor]) -> Tensor:
        """Those rows of T tables [M, N], end to end: [sum of U, N]."""
        return torch.cat([table[ids_U] for table, ids_U in zip(tables, self.unique_ids, strict=True)])


class Tables(nn.Module):
    """TT tables that share a lookup, as in a collection of embedding bags."""

    def __init__(self, case: GpuLookupCase, device: str) -> None:
        super().__init__()
        self.dim = case.dim
        self.bags = nn.ModuleList(
            TTEmbeddingBag(count, case.dim, shape=shape, device=device)
            for count, shape in zip(case.rows, case.tt_shapes, strict=True)
        )

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Look up ids [L], table after table, with offsets [T * B + 1]; returns [B, T * N]."""
        tables = [bag for bag in self.bags if isinstance(bag, TTEmbeddingBag)]
        ids = [[part] for part in values.split(len(values) // len(tables))]
        plan = plan_tables(ids, tables, [["ids"]] * len(tables))
        parts = [table.forward_parameters() for table in tables]
        return tt_bags(parts, plan, offsets, num_cols=self.dim, features=len(tables))


class GraphProvider(TorchProvider):
    """A step in a CUDA graph: a call copies its ids into the graph's input and replays it. Values are those of a replay."""

    def __init__(self, module: nn.Module, batches: Sequence[tuple[Any, ...]], upstream: Tensor, optimizer: Any) -> None:
        super().__init__(module, batches, upstream, optimizer=optimizer)
        self._inputs = [tensor.clone() for tensor in batches[0]]
        before = copy.deepcopy(module.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._recorded()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._recorded()
        module.load_state_dict(before)

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._replay}

    def verify(self) -> dict[str, Tensor]:
        """The output alone: gradients stay in the graph, and are those of the weights before its update."""
        output = self._replay(0).clone()
        return {"output": output, **parameter_gradients(self.module)}

    def release(self) -> None:
        """Do nothing: gradients belong to the graph."""

    def _recorded(self) -> Tensor:
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        output: Tensor = self.module(*self._inputs)
        output.backward(self._upstream)
        self._optimizer.step()
        return output

    def _replay(self, turn: int) -> Tensor:
        self._inputs[0].copy_(self._batches[turn % len(self._batches)][0])
        self._graph.replay()
        return self._output


class GpuLookupWorkload:
    """Tables in every form, batches and the upstream gradient."""

    baselines = (DENSE, FBGEMM)

    def __init__(self, case: GpuLookupCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self._device = case, device
        self.tables = Tables(case, device)
        self.batches = [FlatBatch(case.rows, case.batch, device) for _ in range(NUM_BATCHES)]
        self.upstream = torch.randn(case.batch, len(case.rows) * case.dim).to(device)
        self.left_out: dict[str, str] = {}
        if importlib.util.find_spec("fbgemm_gpu") is None:
            self.left_out[FBGEMM] = "fbgemm-gpu is not installed"
        if not device.startswith("cuda"):
            self.left_out[GRAPH] = "there is no GPU"

    @property
    def providers(self) -> Mapping[str, Callable[[], Provider]]:
        factories: dict[str, Callable[[], Provider]] = {
            DENSE: self._dense, FBGEMM: self._fbgemm, TT: self._eager, GRAPH: self._graph,
        }  # fmt: skip
        return {name: make for name, make in factories.items() if name not in self.left_out}

    def reference(self) -> dict[str, Tensor]:
        """Outputs, gradients and updated rows of the first batch, from unique rows by definition in float64."""
        exact, batch = copy.deepcopy(self.tables).double(), self.batches[0]
        rows = []
        for bag, ids_U in zip(exact.bags, batch.unique_ids, strict=True):
            assert isinstance(bag, TTEmbeddingBag)
            bag.impl = "reference"
            row_UN = bag(ids_U, torch.arange(len(ids_U), device=ids_U.device))
            row_UN.retain_grad()
            rows.append(row_UN)
        tables = zip(rows, batch.unique_ids, batch.ids, strict=True)
        bags = [rows_UN[torch.searchsorted(ids_U, ids)] for rows_UN, ids_U, ids in tables]
        output = torch.cat(bags, dim=1)
        output.backward(self.upstream.double())
        gradient_UN = torch.cat([row_UN.grad for row_UN in rows if row_UN.grad is not None])
        step_U1 = LR / (gradient_UN.square().mean(1, keepdim=True).sqrt() + EPS)
        return {
            "output": output.detach(), "gradient of rows": gradient_UN,
            "rows after Adagrad": torch.cat([row_UN.detach() for row_UN in rows]) - step_U1 * gradient_UN,
            **parameter_gradients(exact),
        }  # fmt: skip

    def counted(self, provider: Provider, pass_: str) -> dict[str, float]:
        """Parameters, unique ids, and the least time of a pass over dense rows: bags, their gradients, unique rows."""
        is_ours = isinstance(provider, TorchProvider) and not isinstance(provider.module, EmbeddingBags)
        unique = sum(len(ids_U) for ids_U in self.batches[0].unique_ids)
        bags, rows = 4.0 * self.upstream.numel(), 4.0 * unique * self.case.dim
        moved = bags + rows if pass_ == "forward" else 2 * bags + 3 * rows
        params = parameter_count(self.tables)
        dense = float(sum(self.case.rows) * self.case.dim)
        least = Least(bytes=moved, multiply_adds=0.0).counted(self._device)
        return {"params": params if is_ours else dense, "compression": dense / params, "unique_ids": unique, **least}

    def _ours(self, provider: Callable[..., TorchProvider]) -> TorchProvider:
        module = copy.deepcopy(self.tables)
        # A graph can hold Adam's kernel for all parameters at once; Adagrad has no such kernel on GPUs.
        optimizer = torch.optim.Adam(module.parameters(), lr=LR, fused=True, capturable=self._device.startswith("cuda"))
        return provider(
            module,
            [(batch.features.values(), batch.features.offsets()) for batch in self.batches],
            self.upstream,
            optimizer=optimizer,
        )

    def _eager(self) -> Provider:
        provider = self._ours(TorchProvider)
        provider._shown = lambda: parameter_gradients(provider.module)
        return provider

    def _graph(self) -> Provider:
        return self._ours(GraphProvider)

    def _tables(self) -> list[Tensor]:
        """The dense tables [M, N]; the rows that batches use are those of the TT tables."""
        storage = shared_storage(self.case.rows, self.case.dim, self._device, resident=True)
        tables = split_storage(storage, self.case.rows, self.case.dim)
        exact = copy.deepcopy(self.tables).double()
        with torch.no_grad():
            for t, (bag, table_MN) in enumerate(zip(exact.bags, tables, strict=True)):
                assert isinstance(bag, TTEmbeddingBag)
                bag.impl = "reference"
                for batch in self.batches:
                    ids_U = batch.unique_ids[t]
                    table_MN[ids_U] = bag(ids_U, torch.arange(len(ids_U), device=self._device)).float()
        return tables

    def _dense(self) -> Provider:
        module = EmbeddingBags(self._tables())
        optimizer = RowWiseAdagrad(module.parameters(), lr=LR, eps=EPS)

        def shown() -> dict[str, Tensor]:
            weights = [weight.detach() for weight in module.parameters()]
            gradients = [weight.grad.coalesce().values() for weight in module.parameters() if weight.grad is not None]
            optimizer.step()
            return {"gradient of rows": torch.cat(gradients), "rows after Adagrad": self.batches[0].unique_rows(weights)}

        return TorchProvider(module, [(batch,) for batch in self.batches], self.upstream, optimizer=optimizer, shown=shown)

    def _fbgemm(self) -> Provider:
        self._tables()
        storage = shared_storage(self.case.rows, self.case.dim, self._device, resident=True)
        gc.collect()
        fbgemm = importlib.import_module("benchmarks.lookup.fbgemm")
        provider: Provider = fbgemm.FbgemmProvider(
            storage, self.case.rows, self.case.dim, self.batches, self.upstream, lr=LR, eps=EPS
        )
        return provider
