"""Embedding bags over a collection of tables: dense, FBGEMM's fused, and TT tables with and without deduplication.

All providers of a case hold the same tables, at least in the rows that its batches use. Every pass takes the next of several
batches, the same one for all, so that no provider profits from rows that the last call left in the caches.

Shapes: T tables, M rows of a table, N embedding_dim, B bags, L ids and U unique ids of one table.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from tqdm import tqdm

import comera_rec as cr
from benchmarks.harness.measure import Settings, measure_cases
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes, TorchProvider, Workload, gradient_of, parameter_count, parameter_gradients
from benchmarks.lookup import rivals
from benchmarks.lookup.rivals import Batch, EmbeddingBags, FbgemmTables, rows_of
from comera_rec.nn import update_in_backward_
from comera_rec.nn.tt_table import plan_tables
from comera_rec.ops import tt_bags
from comera_rec.ops.bags import TableGroup
from comera_rec.ops.bags.kept import UntilChanged
from data_pipeline.planted import CATEGORY_SPECS

try:
    import torchrec.optim
    from torchrec import KeyedJaggedTensor
except ImportError:  # the GPU suite also runs without it
    KeyedJaggedTensor = None

# torch 2.13 warns every user of a KeyedJaggedTensor about is_fx_tracing.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

KAGGLE = tuple(column.cardinality for column in CATEGORY_SPECS.values())
CRITEO_KAGGLE = tuple(count for count in KAGGLE if count > 100_000)
ZIPF = 1.05
NUM_BATCHES = 8
LR, EPS = 0.01, 1e-8

DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP = "nn.EmbeddingBag sparse", "FBGEMM", "TTM no dedup", "TTM row dedup"
OURS, UPDATED = "TTEmbeddingBagCollection", "TTEmbeddingBagCollection, updated in backward"
TT = "TT tables"
FBGEMM_GRAPH = "FBGEMM, CUDA graph"
GRAPHS = {f"TT tables, {name}, CUDA graph": name for name in ("row-wise Adagrad", "Adagrad")}
"""Captured steps on a GPU -> the optimizer that updates cores in backward."""
ON_CPU = (DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP, OURS, UPDATED)
ON_GPU = (DENSE, FBGEMM, FBGEMM_GRAPH, TT, *GRAPHS, UPDATED)


@dataclass(frozen=True, kw_only=True)
class LookupCase(Sizes):
    """Tables of one dim, their TT forms, and batches of `batch` bags of `bag` ids by Zipf's law; exponent 0 is uniform."""

    rows: tuple[int, ...] = CRITEO_KAGGLE
    dim: int = 64
    order: int = 2
    rank: int = 16
    batch: int
    bag: int = 1
    zipf: float = ZIPF
    providers: tuple[str, ...] = ON_CPU

    @property
    def tt_shapes(self) -> list[cr.TTShape]:
        """Modes and ranks of each table."""
        return [cr.TTShape.for_table(count, self.dim, tt_ranks=self.rank, order=self.order) for count in self.rows]

    @property
    def compression(self) -> float:
        """Dense parameters of all tables divided by those of the TT tables."""
        return sum(self.rows) * self.dim / sum(shape.num_params for shape in self.tt_shapes)

    def shapes(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("dim", "order", "rank", "batch", "bag")}
        return {"tables": len(self.rows), "rows": sum(self.rows), **sizes, "ids": f"zipf {self.zipf:g}" if self.zipf else "uniform"}


def cases(quick: bool, device: str = "cpu") -> list[LookupCase]:
    """The cases by which the lookup is judged; all on CPU share the dense tables."""
    sized = partial(LookupCase, providers=ON_CPU if device == "cpu" else ON_GPU)
    if quick:
        small = partial(sized, rows=(300_000, 100_000, 20_000), dim=32, batch=2048)
        return [small(), small(order=3, zipf=0), small(order=4, bag=4)]
    if device != "cpu":
        without_row_wise = tuple(name for name in ON_GPU if "row-wise" not in name and name != UPDATED)
        deep = [sized(order=order, batch=16_384, providers=without_row_wise) for order in (3, 4)]
        by_batch = [sized(dim=dim, batch=batch) for dim in (64, 128) for batch in (2048, 16_384, 65_536)]
        return [*by_batch, *(sized(rank=rank, batch=16_384) for rank in (8, 32)), *deep, sized(rows=KAGGLE, batch=2048)]
    return [
        *(sized(order=order, rank=rank, batch=16_384) for order, rank in ((2, 8), (2, 16), (2, 32), (3, 16), (4, 16))),
        *(sized(rank=rank, batch=batch, providers=(FBGEMM, UPDATED)) for batch in (512, 2048) for rank in (8, 16, 32)),
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case, without providers that this machine can't run."""
    able = [_able(case, settings.device) for case in cases(settings.quick, settings.device)]
    yield from measure_cases("lookup", able, LookupWorkload, settings)


def _able(case: LookupCase, device: str) -> LookupCase:
    """Leave out providers whose packages are not installed, and dense ones whose tables don't fit into memory."""
    missing = {FBGEMM, FBGEMM_GRAPH} if rivals.SplitTableBatchedEmbeddingBagsCodegen is None else set()
    missing |= {OURS, UPDATED, next(iter(GRAPHS))} if KeyedJaggedTensor is None else set()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else torch.cuda.mem_get_info(device)[1]
    missing |= {DENSE, FBGEMM, FBGEMM_GRAPH} if 4 * sum(case.rows) * case.dim > 0.85 * memory else set()
    if missing := missing.intersection(case.providers):
        tqdm.write(f"lookup, {case.shapes()}: without {', '.join(sorted(missing))}: not installed, or larger than memory")
    return replace(case, providers=tuple(name for name in case.providers if name not in missing))


class TTTables(nn.Module):
    """TT tables that share a lookup, as in a collection of embedding bags but without TorchRec."""

    def __init__(self, case: LookupCase, device: str) -> None:
        super().__init__()
        self._group: UntilChanged[TableGroup] = UntilChanged()
        bags = [
            cr.TTEmbeddingBag(count, case.dim, shape=shape, include_last_offset=True, device=device)
            for count, shape in zip(case.rows, case.tt_shapes, strict=True)
        ]
        self.bags = nn.ModuleDict({f"t{t}": bag for t, bag in enumerate(bags)})

    def tables(self) -> list[cr.TTEmbeddingBag]:
        """All tables."""
        return [bag for bag in self.bags.values() if isinstance(bag, cr.TTEmbeddingBag)]

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Look up ids [T * L], table after table, with offsets [T * B + 1]; returns [B, T * N]."""
        tables = self.tables()
        plan = plan_tables([[ids] for ids in values.chunk(len(tables))], tables, [["ids"]] * len(tables))
        group = self._group.get(
            [each for table in tables for each in table.lookup_parameters()],
            lambda: TableGroup([table.forward_parameters() for table in tables]),
        )
        return tt_bags(group, plan, offsets, num_cols=tables[0].embedding_dim, features=len(tables))


class LookupWorkload(Workload):
    """Tables in every form, their batches and the upstream gradient."""

    baselines = (DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP)

    def __init__(self, case: LookupCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self._device = case, device
        self.tt_tables = TTTables(case, device)
        self.batches = [Batch.draw(case.rows, case.batch, case.bag, case.zipf, device) for _ in range(NUM_BATCHES)]
        self.upstream = torch.randn(case.batch, len(case.rows) * case.dim).to(device)
        self._storage = partial(rivals.shared_storage, case.rows, case.dim, device)

    @property
    def providers(self) -> Mapping[str, Callable[[], TorchProvider]]:
        """Name -> factory. Making a dense provider rewrites the rows, because an earlier provider may have trained them."""
        factories: dict[str, Callable[[], TorchProvider]] = {
            DENSE: self._dense,
            FBGEMM: lambda: self._fbgemm(rivals.FusedProvider),
            FBGEMM_GRAPH: lambda: self._fbgemm(FbgemmInGraph),
            NO_DEDUP: lambda: self._chained(dedup=False),
            ROW_DEDUP: lambda: self._chained(dedup=True),
            OURS: lambda: self._ours(updated=False),
            UPDATED: lambda: self._ours(updated=True),
            TT: lambda: TorchProvider(
                self.tt_tables, self._inputs, self.upstream, shown=partial(parameter_gradients, self.tt_tables.bags)
            ),
            **{name: partial(self._captured, optimizer) for name, optimizer in GRAPHS.items()},
        }
        return {name: factories[name] for name in self.case.providers}

    def reference(self) -> dict[str, Tensor]:
        """Outputs, gradients and updated rows of the first batch, whose unique rows are chained in float64."""
        batch, dim = self.batches[0], self.case.dim
        outputs, rows, row_gradients = [], [], []
        exact = copy.deepcopy(self.tt_tables).double()
        upstreams = self.upstream.split(dim, dim=1)
        for bag, ids, ids_U, upstream_BN in zip(exact.tables(), batch.ids, batch.unique_ids, upstreams, strict=True):
            rows_UN = rows_of(bag, ids_U)
            rows_UN.retain_grad()
            positions_L = torch.searchsorted(ids_U, ids)
            output_BN = F.embedding_bag(positions_L, rows_UN, batch.offsets, mode="sum", include_last_offset=True)
            output_BN.backward(upstream_BN.double())
            outputs.append(output_BN.detach())
            rows.append(rows_UN.detach())
            row_gradients.append(gradient_of(rows_UN))
        gradient_UN = torch.cat(row_gradients)
        step_U1 = LR / (gradient_UN.square().mean(1, keepdim=True).sqrt() + EPS)
        return {
            "output": torch.cat(outputs, dim=1),
            "gradient of rows": gradient_UN,
            "rows after Adagrad": torch.cat(rows) - step_U1 * gradient_UN,
            **parameter_gradients(exact.bags),
        }

    def counted(self, provider: TorchProvider) -> dict[str, float]:
        """Parameters, compression of the TT tables, and unique ids of a batch, averaged over the batches."""
        is_dense = isinstance(provider.module, EmbeddingBags | FbgemmTables)
        params = sum(self.case.rows) * self.case.dim if is_dense else parameter_count(provider.module)
        unique = sum(len(ids_U) for batch in self.batches for ids_U in batch.unique_ids) / len(self.batches)
        return {"params": float(params), "compression": self.case.compression, "unique_ids": unique}

    def _tables(self) -> list[Tensor]:
        """The dense tables [M, N]; the rows that the batches use are written from the TT tables."""
        sizes = [count * self.case.dim for count in self.case.rows]
        tables = [table.view(-1, self.case.dim) for table in self._storage().split(sizes)]
        exact = copy.deepcopy(self.tt_tables).double()
        with torch.no_grad():
            for t, (table_MN, bag) in enumerate(zip(tables, exact.tables(), strict=True)):
                for batch in self.batches:
                    table_MN[batch.unique_ids[t]] = rows_of(bag, batch.unique_ids[t]).to(table_MN.dtype)
        return tables

    def _dense(self) -> TorchProvider:
        module = EmbeddingBags(self._tables())
        optimizer = rivals.RowWiseAdagrad(module.parameters(), lr=LR, eps=EPS)

        def shown() -> dict[str, Tensor]:
            weights = [weight.detach() for weight in module.parameters()]
            gradients = [gradient_of(weight).coalesce().values() for weight in module.parameters()]
            optimizer.step()
            return {"gradient of rows": torch.cat(gradients), "rows after Adagrad": self.batches[0].unique_rows(weights)}

        return TorchProvider(module, [(batch,) for batch in self.batches], self.upstream, optimizer=optimizer, shown=shown)

    def _fbgemm(self, provider: type[rivals.FusedProvider]) -> rivals.FusedProvider:
        module = FbgemmTables(self._storage(), self.case.rows, self.case.dim, lr=LR, eps=EPS)

        def shown() -> dict[str, Tensor]:
            return {"rows after Adagrad": self.batches[0].unique_rows(module.bags.split_embedding_weights())}

        made = provider(module, self._inputs, self.upstream, shown=shown)
        self._tables()
        return made

    def _chained(self, *, dedup: bool) -> TorchProvider:
        cores = {  # (m, r, n, s); the rank parameters are ones
            f"t{t}": [core.detach().transpose(0, 1).contiguous() for core in bag.cores()]
            for t, bag in enumerate(self.tt_tables.tables())
        }
        module = rivals.ChainedTables(cores, self.case.bag, dedup=dedup)

        def shown() -> dict[str, Tensor]:
            return {name: gradient.transpose(0, 1) for name, gradient in parameter_gradients(module.tables).items()}

        inputs = [(batch,) for batch in self.batches]
        return TorchProvider(module, inputs, self.upstream, optimizer=_adagrad(module), shown=shown)

    def _ours(self, *, updated: bool) -> TorchProvider:
        configs = [
            cr.TTEmbeddingBagConfig(
                name=f"t{t}", feature_names=[f"f{t}"], num_embeddings=count, embedding_dim=self.case.dim, shape=shape
            )
            for t, (count, shape) in enumerate(zip(self.case.rows, self.case.tt_shapes, strict=True))
        ]
        collection = cr.TTEmbeddingBagCollection(configs, device=self._device)
        collection.tt_bags.load_state_dict(self.tt_tables.bags.state_dict())
        module = PooledValues(collection)
        shown = partial(parameter_gradients, collection.tt_bags)
        features = [
            (KeyedJaggedTensor([f"f{t}" for t in range(len(batch.ids))], batch.values, lengths=batch.all_offsets.diff()),)
            for batch in self.batches
        ]
        if not updated:
            return TorchProvider(module, features, self.upstream, optimizer=_adagrad(module), shown=shown)
        kind = torchrec.optim.RowWiseAdagrad
        _apply_optimizer_in_backward(kind, module.parameters(), {"lr": LR, "eps": EPS})
        return UpdatedProvider(module, features, self.upstream, prefix="collection.tt_bags.")

    def _captured(self, name: str) -> TorchProvider:
        module = copy.deepcopy(self.tt_tables)
        kind = torch.optim.Adagrad if name == "Adagrad" else torchrec.optim.RowWiseAdagrad
        in_backward = self.case.order == 2  # cores of others get gradients, which one optimizer takes faster than one for each
        if in_backward:
            _apply_optimizer_in_backward(kind, module.parameters(), {"lr": LR, "eps": EPS})
        optimizer = None if in_backward else kind(module.parameters(), lr=LR, eps=EPS)
        return UpdatedInGraph(module, self._inputs, self.upstream, optimizer=optimizer, prefix="bags.")

    @property
    def _inputs(self) -> list[tuple[Tensor, Tensor]]:
        return [(batch.values, batch.all_offsets) for batch in self.batches]


class PooledValues(nn.Module):
    """The values of the KeyedTensor that a collection returns, [B, T * N]."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.collection(features).values()
        return values


class UpdatedProvider(TorchProvider):
    """Our tables with cores updated in backward, as FBGEMM's are.

    Args:
        optimizer: its step updates what else there is; None if optimizers were applied in backward to all parameters.
        prefix: of the tables' names in the module.
    """

    def __init__(
        self, module: nn.Module, batches: Any, upstream: Tensor, *, optimizer: torch.optim.Optimizer | None = None, prefix: str
    ) -> None:
        super().__init__(module, batches, upstream, optimizer=optimizer)
        self._prefix = prefix
        if optimizer is not None:
            update_in_backward_(module, optimizer)

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._step}

    def verify(self) -> dict[str, Tensor]:
        """Show as gradients what SGD with a learning rate of 1 subtracts from the parameters of a copy."""
        module = copy.deepcopy(self.module)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        provider = type(self)(module, self._batches, self._upstream, optimizer=optimizer, prefix=self._prefix)
        output = provider.passes["step"](0)
        assert isinstance(output, Tensor)
        named = module.named_parameters()
        changes = {f"gradient of {name.removeprefix(self._prefix)}": before[name] - table.detach() for name, table in named}
        return {"output": output.detach().clone(), **changes}


class InGraph(TorchProvider):
    """Puts a provider's step in a CUDA graph: a call copies its ids into the graph's input and replays it."""

    _graph: torch.cuda.CUDAGraph | None = None

    def _capture(self) -> None:
        batches, self._input = self._batches, tuple(tensor.clone() for tensor in self._batches[0])
        self._batches, stream = [self._input], torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(0)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self._step(0)
        self._batches, self._graph = batches, graph

    @property
    def passes(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._forward_backward}

    def _forward_backward(self, turn: int) -> Tensor:
        if self._graph is None:
            return super()._forward_backward(turn)
        self._input[0].copy_(self._batches[turn % len(self._batches)][0])
        self._graph.replay()
        return self._output


class UpdatedInGraph(InGraph, UpdatedProvider):
    """Our tables, updated in backward, in a graph."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        before = copy.deepcopy(module.state_dict())
        self._capture()
        module.load_state_dict(before)


class FbgemmInGraph(InGraph, rivals.FusedProvider):
    """FBGEMM's tables in a graph."""

    def __init__(self, module: FbgemmTables, *arguments: Any, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        self._capture()
        for states in module.bags.split_optimizer_states():
            for state in states:
                state.zero_()


def _adagrad(module: nn.Module) -> torch.optim.Optimizer:
    on_cpu = next(module.parameters()).device.type == "cpu"
    return torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS, fused=on_cpu, foreach=not on_cpu)
