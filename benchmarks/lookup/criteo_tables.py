"""Embedding bags over a collection of tables: dense, FBGEMM's fused, and TT tables with and without deduplication.

All providers of a case hold the same tables, at least in the rows that its batches use. Every pass takes the next of several
batches, the same one for all, so that no provider profits from rows that the last call left in the caches.

Shapes: T tables, M rows of a table, N embedding_dim, B bags, L ids and U unique ids of one table.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

import comera_rec as cr
from benchmarks.harness.limits import Least
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Provider, TorchProvider, parameter_count, parameter_gradients
from benchmarks.lookup.batch import Batch
from benchmarks.lookup.chained import ChainedTables, chain_bytes, rows_of
from benchmarks.lookup.dense import EmbeddingBags, RowWiseAdagrad, shared_storage, split_storage
from benchmarks.lookup.fbgemm import FbgemmProvider
from comera_rec.nn import update_in_backward_
from comera_rec.tt import row_digits
from data_pipeline.planted_columns import CATEGORY_SPECS

KAGGLE = tuple(column.cardinality for column in CATEGORY_SPECS.values())
CRITEO_KAGGLE = tuple(count for count in KAGGLE if count > 100_000)
ZIPF = 1.05
NUM_BATCHES = 8
LR, EPS = 0.01, 1e-8
MOST_BYTES = 10 << 30  # memory limit of a step
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP, OURS, UPDATED = (
    "nn.EmbeddingBag sparse",
    "FBGEMM",
    "TTM no dedup",
    "TTM row dedup",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagCollection, updated in backward",
)


@dataclass(frozen=True, kw_only=True)
class LookupCase:
    """Tables of one dim, their TT forms, and batches of `batch` bags of `bag` ids by Zipf's law; exponent 0 is uniform."""

    rows: tuple[int, ...] = CRITEO_KAGGLE
    dim: int = 64
    order: int = 2
    rank: int = 16
    batch: int
    bag: int = 1
    zipf: float = ZIPF
    providers: tuple[str, ...] = (DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP, OURS, UPDATED)
    dtype: str = "float32"

    @property
    def tt_shapes(self) -> list[cr.TTShape]:
        """Modes and ranks of each table."""
        return [cr.TTShape.for_table(count, self.dim, tt_ranks=self.rank, order=self.order) for count in self.rows]

    @property
    def compression(self) -> float:
        """Dense parameters of all tables divided by those of the TT tables."""
        return sum(self.rows) * self.dim / sum(shape.num_params for shape in self.tt_shapes)

    @property
    def left_out(self) -> dict[str, str]:
        """Providers that this machine can't run -> the reason."""
        chains, dense = sum(chain_bytes(shape, self.batch * self.bag) for shape in self.tt_shapes), 4 * sum(self.rows) * self.dim
        reasons = {}
        if chains > MOST_BYTES:
            reasons[NO_DEDUP] = f"a step would take about {chains / 2**30:.3g} GiB"
        if dense > 0.85 * MEMORY:
            reasons |= dict.fromkeys((DENSE, FBGEMM), f"the tables would take {dense / 2**30:.3g} of {MEMORY / 2**30:.3g} GiB")
        return reasons

    def shapes(self) -> dict[str, Any]:
        return {
            "tables": len(self.rows),
            "rows": sum(self.rows),
            "dim": self.dim,
            "order": self.order,
            "rank": self.rank,
            "batch": self.batch,
            "bag": self.bag,
            "ids": f"zipf {self.zipf:g}" if self.zipf else "uniform",
        }


def criteo_rows(dim: int) -> tuple[int, ...]:
    """Row counts of Criteo's large tables, each cut to fit into 4 GiB.

    FBGEMM's update on CPU multiplies row numbers in 32 bits (as of 1.8) and updates the wrong rows of a larger table. At dim 64 all
    rows fit; at dim 128 the largest table loses a sixth.
    """
    return tuple(min(count, (4 << 30) // (4 * dim)) for count in CRITEO_KAGGLE)


def cases(quick: bool) -> list[LookupCase]:
    """The cases by which the lookup is judged; those of one dim are adjacent, because they share the dense tables."""
    if quick:
        small = partial(LookupCase, rows=(300_000, 100_000, 20_000), dim=32, batch=2048)
        return [small(), small(order=3, zipf=0), small(order=4, bag=4)]
    sized = {dim: partial(LookupCase, rows=criteo_rows(dim), dim=dim) for dim in (64, 128)}
    sizes = [(dim, batch, zipf) for dim in (64, 128) for batch in (10_000, 20_000, 40_000) for zipf in (ZIPF, 0)]
    ranks = ((2, 8), (2, 16), (2, 32), (3, 16), (3, 32), (4, 16))
    settings = [(order, rank, batch) for order, rank in ranks for batch in (16_384, 20_000)]
    grid = [
        *(sized[dim](batch=batch, zipf=zipf) for dim, batch, zipf in sizes),
        *(LookupCase(order=order, rank=rank, batch=batch) for order, rank, batch in settings),
        *(LookupCase(batch=4096, bag=10, zipf=zipf) for zipf in (ZIPF, 0)),
    ]
    return sorted(dict.fromkeys(grid), key=lambda case: case.dim)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case."""
    yield from measure_lookups("lookup", cases(settings.quick), settings)


def measure_lookups(op: str, cases: list[LookupCase], settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of cases; where memory is measured, no process holds complete dense tables."""
    yield from measure_cases(op, cases, LookupWorkload, settings, build_for_memory=partial(LookupWorkload, timed=False))


class LookupWorkload:
    """Tables in every form, their batches and the upstream gradient.

    Args:
        case, device, seed: as for any workload.
        timed: use several batches, and dense tables with all pages resident. Otherwise there is one batch, and only the pages of
            dense tables that it uses are resident, because a call's extra memory can depend on nothing else.
    """

    baselines = (DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP)

    def __init__(self, case: LookupCase, device: str, seed: int, *, timed: bool = True) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.left_out = case.left_out
        self.collection = _collection(case, device)
        self.batches = [Batch.draw(case.rows, case.batch, case.bag, case.zipf, device) for _ in range(NUM_BATCHES if timed else 1)]
        self.upstream = torch.randn(case.batch, len(case.rows) * case.dim).to(device)
        self._storage = partial(shared_storage, case.rows, case.dim, device, resident=timed)

    @property
    def providers(self) -> Mapping[str, Callable[[], Provider]]:
        """Name -> factory. Making a dense provider rewrites the rows, because an earlier provider may have trained them."""
        factories: dict[str, Callable[[], Provider]] = {
            DENSE: self._dense,
            FBGEMM: self._fbgemm,
            NO_DEDUP: lambda: self._chained(dedup=False),
            ROW_DEDUP: lambda: self._chained(dedup=True),
            OURS: self._ours,
            UPDATED: self._updated,
        }
        return {name: factories[name] for name in self.case.providers if name not in self.left_out}

    def reference(self) -> dict[str, Tensor]:
        """Outputs, gradients and updated rows of the first batch, whose unique rows are chained in float64."""
        batch, dim = self.batches[0], self.case.dim
        outputs, rows, row_gradients = [], [], []
        exact = copy.deepcopy(self.collection).double()
        upstreams = self.upstream.split(dim, dim=1)
        for name, ids, ids_U, upstream_BN in zip(exact.tt_bags, batch.ids, batch.unique_ids, upstreams, strict=True):
            rows_UN = rows_of(exact.tt_bag(name), ids_U)
            rows_UN.retain_grad()
            positions_L = torch.searchsorted(ids_U, ids)
            output_BN = F.embedding_bag(positions_L, rows_UN, batch.offsets, mode="sum", include_last_offset=True)
            output_BN.backward(upstream_BN.double())
            outputs.append(output_BN.detach())
            rows.append(rows_UN.detach())
            row_gradients.append(_gradient(rows_UN))
        gradient_UN = torch.cat(row_gradients)
        step_U1 = LR / (gradient_UN.square().mean(1, keepdim=True).sqrt() + EPS)
        return {
            "output": torch.cat(outputs, dim=1),
            "gradient of rows": gradient_UN,
            "rows after Adagrad": torch.cat(rows) - step_U1 * gradient_UN,
            **parameter_gradients(exact.tt_bags),
        }

    def counted(self, provider: Provider, pass_: str) -> dict[str, float]:
        """Parameters, compression of the TT tables, and unique ids of a batch, averaged over the batches."""
        params = parameter_count(provider.module) if isinstance(provider, TorchProvider) else sum(self.case.rows) * self.case.dim
        unique = sum(len(ids_U) for batch in self.batches for ids_U in batch.unique_ids) / len(self.batches)
        is_dense = not isinstance(provider, TorchProvider) or isinstance(provider.module, EmbeddingBags)
        limits = self._least(pass_, unique, is_dense=is_dense).counted(self.upstream.device.type)
        return {"params": float(params), "compression": self.case.compression, "unique_ids": unique, **limits}

    def _least(self, pass_: str, unique: float, *, is_dense: bool) -> Least:
        """Count bags written and their gradients read, and the slices, or dense rows, that a batch uses, each once per pass.

        An update reads and writes them and Adagrad's sums: one per row of dense tables, one per number of cores. Each unique row
        takes a product of (n1 x r) and (r x n2), and two more backward; orders 3 and 4 need more, which is ignored.
        """
        case = self.case
        bags = 4.0 * self.upstream.numel()
        if is_dense:
            rows = 4.0 * unique * case.dim
            adds = float(case.batch * case.bag * len(case.rows) * case.dim)
            if pass_ == "forward":
                return Least(bytes=bags + rows, multiply_adds=adds)
            return Least(bytes=2 * bags + 3 * rows + 8 * unique, multiply_adds=2 * adds)
        slices = 4.0 * self._slice_numbers()
        products = unique * case.rank * case.dim
        if pass_ == "forward":
            return Least(bytes=bags + slices, multiply_adds=products)
        return Least(bytes=2 * bags + slices + (3 * slices if pass_ == "step" else slices), multiply_adds=3 * products)

    def _slice_numbers(self) -> float:
        """Numbers in the slices that a batch uses, averaged over the batches."""
        total = 0
        for batch in self.batches:
            for shape, ids_U in zip(self.case.tt_shapes, batch.unique_ids, strict=True):
                for digits, size in zip(row_digits(ids_U, shape.row_shape), shape.core_shapes, strict=True):
                    total += len(digits.unique()) * size[0] * size[2] * size[3]
        return total / len(self.batches)

    @property
    def _features(self) -> list[tuple[KeyedJaggedTensor]]:
        return [(batch.features,) for batch in self.batches]

    @property
    def _cores(self) -> dict[str, list[Tensor]]:
        """Each table's cores as (m, r, n, s); the rank parameters are ones."""
        return {
            name: [bag.get_parameter(f"core_{k}").detach().transpose(0, 1).contiguous() for k in range(self.case.order)]
            for name, bag in self.collection.tt_bags.items()
        }

    def _tables(self) -> list[Tensor]:
        """The dense tables [M, N]; the rows that the batches use are written from the TT tables."""
        tables = split_storage(self._storage(), self.case.rows, self.case.dim)
        exact = copy.deepcopy(self.collection).double()
        with torch.no_grad():
            for t, (table_MN, name) in enumerate(zip(tables, exact.tt_bags, strict=True)):
                for batch in self.batches:
                    table_MN[batch.unique_ids[t]] = rows_of(exact.tt_bag(name), batch.unique_ids[t]).to(table_MN.dtype)
        return tables

    def _dense(self) -> TorchProvider:
        module = EmbeddingBags(self._tables())
        optimizer = RowWiseAdagrad(module.parameters(), lr=LR, eps=EPS)

        def shown() -> dict[str, Tensor]:
            weights = [weight.detach() for weight in module.parameters()]
            gradients = [_gradient(weight).coalesce().values() for weight in module.parameters()]
            optimizer.step()
            return {"gradient of rows": torch.cat(gradients), "rows after Adagrad": self.batches[0].unique_rows(weights)}

        return self._provider(module, optimizer, shown)

    def _fbgemm(self) -> FbgemmProvider:
        self._tables()
        return FbgemmProvider(self._storage(), self.case.rows, self.case.dim, self.batches, self.upstream, lr=LR, eps=EPS)

    def _chained(self, *, dedup: bool) -> TorchProvider:
        module = ChainedTables(self._cores, self.case.bag, dedup=dedup)

        def shown() -> dict[str, Tensor]:
            return {name: gradient.transpose(0, 1) for name, gradient in parameter_gradients(module.tables).items()}

        return self._provider(module, _adagrad(module), shown)

    def _ours(self) -> TorchProvider:
        module = PooledValues(collection := copy.deepcopy(self.collection))
        shown = partial(parameter_gradients, collection.tt_bags)
        return TorchProvider(module, self._features, self.upstream, optimizer=_adagrad(module), shown=shown)

    def _updated(self) -> UpdatedProvider:
        module = PooledValues(copy.deepcopy(self.collection))
        update_in_backward_(module, optimizer := _adagrad(module))
        return UpdatedProvider(module, self._features, self.upstream, optimizer=optimizer)

    def _provider(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, shown: Callable[[], dict[str, Tensor]]
    ) -> TorchProvider:
        return TorchProvider(module, [(batch,) for batch in self.batches], self.upstream, optimizer=optimizer, shown=shown)


class PooledValues(nn.Module):
    """The values of the KeyedTensor that a collection returns, [B, T * N]; DDP averages gradients only of such a model."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.collection(features).values()
        return values


class UpdatedProvider(TorchProvider):
    """Our tables with cores updated in backward, as FBGEMM's are; the optimizer's step only updates rank parameters."""

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._step}

    def verify(self) -> dict[str, Tensor]:
        """Show as gradients what SGD with a learning rate of 1 subtracts from the parameters of a copy."""
        module = copy.deepcopy(self.module)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        update_in_backward_(module, optimizer)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        output = TorchProvider(module, self._batches, self._upstream, optimizer=optimizer)._step(0).detach()
        tables = dict(module.named_parameters())
        prefix = "collection.tt_bags."
        changes = {f"gradient of {name.removeprefix(prefix)}": before[name] - tables[name].detach() for name in before}
        return {"output": output, **changes}


def _collection(case: LookupCase, device: str) -> cr.TTEmbeddingBagCollection:
    return cr.TTEmbeddingBagCollection(
        [
            cr.TTEmbeddingBagConfig(
                name=f"t{t}",
                feature_names=[f"f{t}"],
                num_embeddings=count,
                embedding_dim=case.dim,
                shape=shape,
                weight_init_min=-1.0,  # the same for all, so that the agreement check is equally strict for each table
                weight_init_max=1.0,
            )
            for t, (count, shape) in enumerate(zip(case.rows, case.tt_shapes, strict=True))
        ],
        device=device,
    )


def _adagrad(module: nn.Module) -> torch.optim.Optimizer:
    on_cpu = next(module.parameters()).device.type == "cpu"
    return torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS, fused=on_cpu, foreach=not on_cpu)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
