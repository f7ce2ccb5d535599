"""A table on several processes: what each way of sharding sends, and its step; the processes share this machine's cores.

Shapes: W processes, B bags of one id per process, N embedding_dim, U unique ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints

import comera_rec as cr
from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.environment import available_cores
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan, alternate
from benchmarks.harness.workload import parameter_gradients
from benchmarks.lookup.chained import rows_of
from benchmarks.lookup.criteo_tables import ZIPF, PooledValues
from benchmarks.sharding.collectives import Counting, mean_sent
from comera_rec.recsys.sharding import ShardedTTEmbeddingBagCollection
from comera_rec.recsys.sharding.parts import RowShard
from comera_rec.recsys.sharding.planner import count_bytes
from comera_rec.testing import run as run_processes

# provider -> (sharding type, TT or dense)
PROVIDERS = {
    "dense table-wise": ("table_wise", False),
    "TT data-parallel": ("data_parallel", True),
    "TT table-wise": ("table_wise", True),
    "TT row-wise": ("row_wise", True),
}
DENSE = "dense table-wise"
LR = 0.1  # learning rate of dense rows, which TorchRec updates in the backward pass


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """One table on several processes; one id per bag, drawn by Zipf's law."""

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

    def table(self) -> EmbeddingBagConfig:
        """The config of the dense table."""
        return EmbeddingBagConfig(name="t", num_embeddings=self.rows, embedding_dim=self.dim, feature_names=["f"])

    def shapes(self) -> dict[str, Any]:
        return {
            "processes": self.world_size,
            "cores": available_cores(),
            "rows": self.rows,
            "dim": self.dim,
            "rank": self.rank,
            "batch": self.batch,
            "smaller": round(self.rows * self.dim / self.tt_shape.num_params),
        }


def cases(quick: bool) -> list[ShardedCase]:
    """One, two and four processes; a small batch, and one as in large training runs with 500 times fewer parameters."""
    if quick:
        return [ShardedCase(world_size=2, batch=256, rows=20_000, dim=16)]
    return [ShardedCase(world_size=world, batch=batch) for world in (1, 2, 4) for batch in (2048, 32_768)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of each case: the slowest process's step, and the bytes that a process sends in it, counted and by formula."""
    for case, rows in each_case("distributed", cases(settings.quick), settings, threads=1):
        results = run_processes(case.world_size, measure, case, settings.seed, 3 if settings.quick else 10)
        samples = {name: [max(turn) for turn in zip(*(ms[name] for ms, _ in results), strict=True)] for name in PROVIDERS}
        counted = {
            name: {f"sent, {key}": value for key, value in mean_sent([sent[name] for _, sent in results]).items()}
            | {f"formula, {key}": value for key, value in expected(case, name).items()}
            for name in PROVIDERS
        }
        yield rows("step", "ms", samples, counted, [DENSE])


def expected(case: ShardedCase, provider: str) -> dict[str, float]:
    """The planner's bytes that a process sends, by collective, averaged over processes; messages about sizes are excluded."""
    kind, _ = PROVIDERS[provider]
    counts = count_bytes(kind, case.tt_shape, case.dim, 1, case.batch, case.batch, case.world_size)
    if kind == "data_parallel":
        return {"all-reduce": counts["gradients"]}
    if kind == "table_wise":  # the owner alone sends bags, and the others alone send their gradients
        return {"all-to-all": counts["ids"] + 2 * counts["bags"] / case.world_size}
    return {
        "all-to-all": counts["ids"],
        "reduce-scatter": counts["bags"],
        "all-gather": counts["bags"],
        "all-reduce": counts["gradients"],
    }


def measure(rank: int, case: ShardedCase, seed: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, Counter[str]]]:
    """In each process, verify every provider, count the bytes sent in one step, and time steps in turns."""
    inputs = Inputs(case, seed)
    reference = inputs.reference()
    providers, sent = {name: Provider(case, name, inputs) for name in PROVIDERS}, {}
    for provider in providers.values():
        provider.verify(reference)
    del reference
    for name, provider in providers.items():
        with provider.counting as counter:
            provider.step(0)
        sent[name] = Counter(counter)
    plan = Plan(warmup=1, min_rounds=rounds, max_rounds=rounds)
    return alternate({name: provider.step for name, provider in providers.items()}, plan, synchronize=dist.barrier), sent


class Inputs:
    """Weights and batches that all providers share.

    Attributes:
        features, upstream: bags of this process, and the gradient of the output.
    """

    def __init__(self, case: ShardedCase, seed: int) -> None:
        self._case, self._seed = case, seed
        batches = []
        for rank in range(case.world_size):
            torch.manual_seed(seed + 1 + rank)
            batches.append((draw_ids(case.rows, case.batch, ZIPF), torch.randn(case.batch, case.dim)))
        ids, self.upstream = batches[dist.get_rank()]
        self.features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(case.batch, dtype=torch.int64))
        self._all_inputs = torch.cat([ids for ids, _ in batches]), torch.cat([upstream for _, upstream in batches])

    def collection(self) -> cr.TTEmbeddingBagCollection:
        """Build the TT table, with the same values in all processes."""
        torch.manual_seed(self._seed)
        return cr.TTEmbeddingBagCollection([cr.TTEmbeddingBagConfig.from_dense(self._case.table(), self._case.tt_shape)])

    def reference(self) -> dict[str, Tensor]:
        """The correct values in float64, from the definition: bags of this process, gradients, bags after a dense table's update.

        As with data parallelism, gradients are those of the mean over the processes.
        """
        case, bag = self._case, self.collection().tt_bag("t").double()
        unique, inverse = self._all_inputs[0].unique(return_inverse=True)
        upstream_UN = torch.zeros(len(unique), case.dim, dtype=torch.float64)
        upstream_UN.index_add_(0, inverse, self._all_inputs[1].double()).div_(case.world_size)
        rows_UN = rows_of(bag, unique)
        rows_UN.backward(upstream_UN)
        rows_UN = rows_UN.detach()
        local = inverse[dist.get_rank() * case.batch :][: case.batch]
        updated_UN = rows_UN - LR * upstream_UN
        return {"output": rows_UN[local], "output after an update": updated_UN[local], **parameter_gradients(bag)}


def sharded_model(model: nn.Module, kind: str, topology: Topology, batch: int, sharders: list[Any]) -> DistributedModelParallel:
    """Shard a model of one table "t" in one way."""
    constraints = {"t": ParameterConstraints(sharding_types=[kind])}
    plan = cr.TTShardingPlanner(topology, batch, constraints=constraints, stats=[]).collective_plan(
        model, sharders, dist.group.WORLD
    )
    return DistributedModelParallel(model, plan=plan, sharders=sharders)


class Provider:
    """A table sharded in one way, and its training step."""

    def __init__(self, case: ShardedCase, name: str, inputs: Inputs) -> None:
        self._name, self._inputs = name, inputs
        kind, self._is_tt = PROVIDERS[name]
        collection = inputs.collection()
        sharders: list[Any] = [
            cr.TTEmbeddingBagCollectionSharder(),
            EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}),
        ]
        model = PooledValues(collection if self._is_tt else EmbeddingBagCollection([case.table()], device=torch.device("meta")))
        self._model = sharded_model(model, kind, Topology(world_size=case.world_size, compute_device="cpu"), case.batch, sharders)
        self.counting = Counting(self._model)
        if not self._is_tt:  # TorchRec reinitializes sharded dense tables
            for shard in self._model.state_dict()["collection.embedding_bags.t.weight"].local_shards():
                shard.tensor.copy_(collection.tt_bag("t").to_dense().weight)
        parameters = list(self._model.parameters())
        # TorchRec fuses the update of a dense table, and a process may hold no part of a TT table.
        self._optimizer = torch.optim.Adagrad(parameters, fused=True) if self._is_tt and parameters else None

    def verify(self, reference: dict[str, Tensor]) -> None:
        """Raise a Disagreement if bags, gradients of this process's shard, or bags after an update differ from the reference."""
        shown = {"output": self._forward_backward()}
        if self._is_tt:
            sharded = self._model.module.collection
            assert isinstance(sharded, ShardedTTEmbeddingBagCollection)
            for bag in sharded.tt_bags.values():
                for name, parameter in bag.named_parameters():
                    quantity = f"gradient of {name}"
                    grad = torch.full_like(parameter, torch.nan) if parameter.grad is None else parameter.grad
                    if isinstance(bag, RowShard) and name == "core_0":
                        first = dist.get_rank() * grad.shape[1]
                        reference = {**reference, quantity: reference[quantity][:, first : first + bag.num_digits]}
                        grad = grad[:, : bag.num_digits]
                    shown[quantity] = grad.clone()
                    parameter.grad = None
        else:
            with torch.no_grad():
                shown["output after an update"] = self._model(self._inputs.features)
        require_agreement(reference, {self._name: shown})

    def step(self, turn: int) -> None:
        self._forward_backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _forward_backward(self) -> Tensor:
        output: Tensor = self._model(self._inputs.features)
        output.backward(self._inputs.upstream)
        return output.detach()
