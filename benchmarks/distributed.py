"""A table on several processes: what each way of sharding sends, and its step; all processes share this machine's cores.

Shapes: W processes, B bags of one id a process, N embedding_dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from tqdm import tqdm

import comera_rec as cr
from benchmarks.batch import draw_ids
from benchmarks.environment import describe
from benchmarks.lookup import ZIPF
from benchmarks.measure import Settings, case_rows, chosen
from benchmarks.processes import run as run_processes
from benchmarks.rows import Row
from benchmarks.timing import Plan, alternate
from comera_rec.recsys.sharding.planner import count_bytes

# provider -> (sharding type, tensor train or dense)
PROVIDERS = {
    "dense table-wise": ("table_wise", False),
    "TT data-parallel": ("data_parallel", True),
    "TT table-wise": ("table_wise", True),
    "TT row-wise": ("row_wise", True),
}
DENSE = "dense table-wise"


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """One table on several processes, one id a bag by Zipf's law."""

    world_size: int
    batch: int
    """Samples of each process."""
    rows: int = 1_000_000
    dim: int = 64
    rank: int = 8
    dtype: str = "float32"

    @property
    def tt_shape(self) -> cr.TTShape:
        """Modes and ranks of the table."""
        return cr.TTShape.for_table(self.rows, self.dim, tt_ranks=self.rank)

    def shapes(self) -> dict[str, Any]:
        return {
            "processes": self.world_size,
            "rows": self.rows,
            "dim": self.dim,
            "rank": self.rank,
            "batch": self.batch,
            "smaller": round(self.rows * self.dim / self.tt_shape.num_params),
        }


def cases(quick: bool) -> list[ShardedCase]:
    """One, two and four processes, and the batch that large trainers use."""
    if quick:
        return [ShardedCase(world_size=2, batch=256, rows=20_000, dim=16)]
    return [ShardedCase(world_size=world, batch=batch) for world in (1, 2, 4) for batch in (2048, 32_768)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Rows of each case: the slowest process's step, and the bytes that a process sends in it, counted and by formula."""
    environment = describe(settings.device)
    for case in tqdm(chosen(cases(settings.quick), settings.only), desc="distributed", unit="case", disable=None):
        results = run_processes(case.world_size, measure, case, settings.seed, 3 if settings.quick else 10)
        samples = {name: [max(turn) for turn in zip(*(ms[name] for ms, _ in results), strict=True)] for name in PROVIDERS}
        counted = {name: mean_sent([sent[name] for _, sent in results]) | expected(case, name) for name in PROVIDERS}
        yield case_rows("distributed", case, settings, environment, "step", "ms", samples, counted, [DENSE])


def mean_sent(of_processes: list[Counter[str]]) -> dict[str, float]:
    """Bytes by collective, mean over the processes."""
    total = sum(of_processes, Counter[str]())
    return {name: count / len(of_processes) for name, count in total.items()}


def expected(case: ShardedCase, provider: str) -> dict[str, float]:
    """The planner's count of bytes that a process sends, mean over the processes; without the few that tell the sizes."""
    kind, is_tt = PROVIDERS[provider]
    counts = count_bytes(kind, case.tt_shape, case.dim, 1, case.batch, case.batch, case.world_size)
    # Bags go forth and their gradients back. Table-wise the owner alone sends bags, and the others alone send gradients.
    owners = case.world_size if kind == "table_wise" else 1
    both_ways = counts["bags"] / owners + (counts["bags"] / owners if kind == "table_wise" else counts["bags"])
    return {"formula, bags": both_ways, "formula, ids": counts["ids"], "formula, gradients": counts["gradients"] if is_tt else 0.0}


def measure(rank: int, case: ShardedCase, seed: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, Counter[str]]]:
    """In each process: ms of every provider's steps, in turns, and bytes sent in one step."""
    torch.manual_seed(seed + rank)
    ids = draw_ids(case.rows, case.batch, ZIPF)
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(case.batch, dtype=torch.int64))
    upstream = torch.randn(case.batch, case.dim)
    steps = {name: step(case, name, features, upstream) for name in PROVIDERS}
    sent = {}
    for name, (call, counter) in steps.items():
        call(0)
        counter.clear()
        with counting(counter):
            call(0)
        sent[name] = Counter(counter)
    plan = Plan(warmup=0, min_rounds=rounds, max_rounds=rounds)
    return alternate({name: call for name, (call, _) in steps.items()}, plan, synchronize=dist.barrier), sent


def step(
    case: ShardedCase, provider: str, features: KeyedJaggedTensor, upstream: torch.Tensor
) -> tuple[Callable[[int], None], Counter[str]]:
    """A training step of a sharded table, and the counter of what its gradients' all-reduce sends."""
    kind, is_tt = PROVIDERS[provider]
    table: dict[str, Any] = {"name": "t", "num_embeddings": case.rows, "embedding_dim": case.dim, "feature_names": ["f"]}
    sharders: list[Any] = [cr.TTEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()]
    collection: torch.nn.Module = EmbeddingBagCollection([EmbeddingBagConfig(**table)])
    if is_tt:
        collection = cr.TTEmbeddingBagCollection([cr.TTEmbeddingBagConfig(**table, shape=case.tt_shape)])
    planner = cr.TTShardingPlanner(
        Topology(world_size=case.world_size, compute_device="cpu"),
        case.batch,
        constraints={"t": ParameterConstraints(sharding_types=[kind])},
        stats=[],
    )
    model: torch.nn.Module = _Values(collection)
    model = DistributedModelParallel(model, plan=planner.collective_plan(model, sharders, dist.group.WORLD), sharders=sharders)
    counter = Counter[str]()
    wrapped, others = model._dmp_wrapped_module, case.world_size - 1
    if isinstance(wrapped, DistributedDataParallel):

        def count_and_reduce(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not as strings
            counter["all-reduce"] += round(2 * others / case.world_size * bucket.buffer().nbytes)  # of a ring
            return allreduce_hook(group, bucket)

        wrapped.register_comm_hook(dist.group.WORLD, count_and_reduce)
    parameters = list(model.parameters())
    # TorchRec fuses the update of a dense table; and a process may hold nothing of a train.
    optimizer = torch.optim.Adagrad(parameters, fused=True) if is_tt and parameters else None

    def call(turn: int) -> None:
        model(features).backward(upstream)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return call, counter


class _Values(torch.nn.Module):
    """The values of the KeyedTensor that a collection returns: DDP averages gradients only if a model returns tensors."""

    def __init__(self, collection: torch.nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.collection(features).values()
        return values


class counting:  # noqa: N801
    """Counts what this process sends to others through the collectives that TorchRec calls, by name, while it is entered."""

    def __init__(self, counter: Counter[str]) -> None:
        self._counter = counter
        self._kept: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        sizes: Mapping[str, Callable[..., int]] = {
            "all_to_all_single": lambda out, given, out_splits=None, splits=None, **_: (
                given.nbytes - (splits[rank] * given[:1].nbytes if splits else given.nbytes // world)
            ),
            "all_gather": lambda out, given, **_: given.nbytes * (world - 1),
            "all_gather_into_tensor": lambda out, given, **_: given.nbytes * (world - 1),
            "reduce_scatter": lambda out, given, **_: sum(part.nbytes for k, part in enumerate(given) if k != rank),
            "reduce_scatter_tensor": lambda out, given, **_: given.nbytes - out.nbytes,
        }
        for name, size in sizes.items():
            self._kept[name] = getattr(dist, name)
            setattr(dist, name, self._counted(name, self._kept[name], size))

    def _counted(self, name: str, original: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        parameters = {"output": "out", "input": "given", "output_split_sizes": "out_splits", "input_split_sizes": "splits"}
        lists = {"tensor_list": "out", "tensor": "given", "input_list": "given", "output_tensor": "out", "input_tensor": "given"}

        def call(*args: Any, **kwargs: Any) -> Any:
            renamed = {{**parameters, **lists}.get(key, key): value for key, value in kwargs.items()}
            self._counter[name.replace("_", "-")] += size(*args, **renamed)
            return original(*args, **kwargs)

        return call

    def __exit__(self, *error: object) -> None:
        for name, original in self._kept.items():
            setattr(dist, name, original)
