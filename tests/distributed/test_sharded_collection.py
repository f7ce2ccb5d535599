"""Sharded collections train as one process would on the same global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from processes import run
from refusals import refuse
from sharding import shard
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel

import comera_rec as cr
from comera_rec.nn import named_tt_modules
from comera_rec.rank import truncate_ranks_
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding import load_optimizer_state_, optimizer_state, rewrap_data_parallel_
from comera_rec.recsys.sharding.collection import ShardedTTEmbeddingBagCollection
from comera_rec.recsys.sharding.parts import RowShard

pytestmark = pytest.mark.distributed

LR, CPU = 0.1, torch.device("cpu")
FEATURES = ["shared", "left", "right", "mean", "small"]
SIZES = [3, 5, 2, 4]  # samples of each process
KINDS = ("data_parallel", "table_wise", "row_wise")
# Truncates after the first and the second step.
SCHEDULE = {"early_steps": 1, "late_steps": 2, "truncate_every": 1, "target_size": 0.6, "beta": 0.1, "threshold": 0.0}


@dataclass(frozen=True)
class Case:
    """`kinds` are the sharding types of the TT tables in order, or one for all."""

    kinds: tuple[str, ...]
    weighted: bool = False
    varies: bool = False  # batch sizes by feature; without dense tables, only in the second step
    dense: bool = True  # tables beside TT tables
    truncates: bool = False  # ranks, after the first step
    objective: str | None = None  # of the rank scheduler, if any
    spare: int = 0  # processes at the end that don't take part; TorchRec's dense tables use global process ranks


def table(name: str, rows: int, dim: int, *features: str, **arguments: Any) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), **arguments)


def tables(case: Case) -> list[Table]:
    pooling = PoolingType.SUM if case.weighted else PoolingType.MEAN
    made = [
        # Hot rows in the shards of several processes; the second block spans two.
        table("two", 1000, 16, "shared", "left", tt_ranks=4, hot_rows=((30, 4), (600, 2))),
        table("three", 700, 128, "right", tt_ranks=3),
        # Dense tables, whose bags TorchRec reorders; it reinitializes sharded ones, so these are constant.
        table("first", 900, 16, "mean", weight_init_min=0.3, weight_init_max=0.3),
        table("small", 20, 24, "small", weight_init_min=0.1, weight_init_max=0.1),
        table("average", 900, 32, "mean", "shared", shape=cr.TTShape((8, 12, 10), (4, 2, 4), (3, 3)), pooling=pooling),
    ]
    return made if case.dense else [each for each in made if each.name not in ("first", "small")]


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = TTEmbeddingBagCollection(tables(case), case.weighted)
        self.bags.tt_bag("two").set_row_order_(torch.randperm(1000))
        self.bags.tt_bag("average").set_row_order_(torch.randperm(900))
        self.over = nn.Linear(sum(each.embedding_dim * len(each.feature_names) for each in self.bags.embedding_bag_configs()), 3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the loss, in the form that the pipeline expects, and the logits."""
        pooled = self.bags(features)
        logits = self.over(pooled.values())
        return logits.square().mean(), logits


def global_batch(step: int, samples: int, case: Case) -> list[KeyedJaggedTensor]:
    """One KeyedJaggedTensor per sample, with bags of any length; "left" is empty in the first sample, "right" in all of step 1.

    Where batch sizes vary, every other sample repeats the one before.
    """
    generator = torch.Generator().manual_seed(step)
    batch = []
    for sample in range(samples):
        if case.varies and sample % 2:
            batch.append(batch[-1])
            continue
        lengths = torch.randint(0, 4, (len(FEATURES),), generator=generator)
        if not sample:
            lengths[1] = 0
        if step == 1:
            lengths[2] = 0
        limits = torch.tensor([900, 1000, 700, 900, 20]).repeat_interleave(lengths)
        values = (torch.rand(len(limits), generator=generator) * limits).long()
        # Unweighted collections ignore them.
        weights = None if case.varies and not case.weighted else torch.rand(len(limits), generator=generator)
        batch.append(KeyedJaggedTensor(FEATURES, values, weights, lengths=lengths))
    return batch


def joined(samples: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    lengths = torch.stack([sample.lengths() for sample in samples], dim=1)
    bags = [sample[key] for key in FEATURES for sample in samples]
    weights = torch.cat([bag.weights() for bag in bags]) if samples[0].weights_or_none() is not None else None
    return KeyedJaggedTensor(FEATURES, torch.cat([bag.values() for bag in bags]), weights, lengths=lengths.flatten())


def without_repeats(samples: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Join samples, giving each feature's different bags once, and by inverse indices which of them each sample has."""
    bags, indices = [], []
    for key in FEATURES:
        different: dict[tuple, int] = {}
        of_samples = []
        for sample in samples:
            bag = sample[key]
            weights = bag.weights_or_none()
            content = (*bag.values().tolist(), *([] if weights is None else weights.tolist()))
            if content not in different:
                bags.append(bag)
            of_samples.append(different.setdefault(content, len(different)))
        indices.append(of_samples)
    weights = None if samples[0].weights_or_none() is None else torch.cat([bag.weights() for bag in bags])
    return KeyedJaggedTensor(
        FEATURES, torch.cat([bag.values() for bag in bags]), weights, lengths=torch.cat([bag.lengths() for bag in bags]),
        stride_per_key_per_rank=[[max(of_samples) + 1] for of_samples in indices],
        inverse_indices=(FEATURES, torch.tensor(indices)),
    )  # fmt: skip


def share(step: int, rank: int, case: Case, world: int) -> KeyedJaggedTensor:
    sizes = SIZES[:world]
    first = sum(sizes[:rank])
    varies = case.varies and (case.dense or step == 1)
    return (without_repeats if varies else joined)(global_batch(step, sum(sizes), case)[first : first + sizes[rank]])


def sharded(case: Case, group: dist.ProcessGroup | None = None, **settings: object) -> DistributedModelParallel:
    kinds = dict(zip(("two", "three", "average"), case.kinds * 3, strict=False))
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR, **settings}
    dense = {"first": "table_wise", "small": "table_wise"} if case.dense else {}
    return shard(Model(case), {**kinds, **dense}, fused=fused, group=group)


def train(model: nn.Module, case: Case, world: int, share_of: Callable[[int], KeyedJaggedTensor]) -> dict[str, Tensor]:
    """Train three steps; return losses, the last logits, and gradients and parameters, of divided cores this process's shard."""
    inner = getattr(model, "module", model)
    parameters = dict(model.named_parameters())
    dense = [parameters.pop(name) for name in list(parameters) if "dense_bags" in name]  # TorchRec updates them, without state
    groups = [{"params": list(parameters.values()), "momentum": 0.9 if case.truncates or case.objective else 0}, {"params": dense}]
    optimizer = torch.optim.SGD(groups, lr=LR)
    scheduler = cr.RankScheduler(inner, optimizer, cr.RankConfig(**SCHEDULE, objective=case.objective)) if case.objective else None
    samples, losses = sum(SIZES[:world]), []
    for step in range(3):
        _, logits = model(share_of(step))
        # The mean over processes is the global mean.
        loss = logits.square().sum() / (samples * logits.shape[1]) * (1 if model is inner else world)
        losses.append(loss.detach())
        loss = scheduler.loss(loss) if scheduler else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler and step < 2:  # gradients of the last step are compared
            scheduler.step()
        if case.truncates and step == 0:
            with torch.no_grad():
                for rank in (rank for _, module in named_tt_modules(model) for rank in module.rank_parameters()):
                    rank[::2] *= 1e-3
            truncate_ranks_(model, optimizer, threshold=0.01)
        if isinstance(model, DistributedModelParallel) and step < 2 and (scheduler or case.truncates):
            rewrap_data_parallel_(model)
    state = {name: value.detach() for name, value in inner.state_dict().items() if "tt_bags" in name or name.startswith("over")}
    outcome = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    outcome = {name: value for name, value in outcome.items() if value.is_floating_point()}
    for name, value in inner.named_parameters():
        if name in outcome:
            assert value.grad is not None, name
            outcome[f"gradient of {name}"] = value.grad[:, : outcome[name].shape[1]] if value.ndim == 4 else value.grad
    return {**outcome, "losses": torch.stack(losses), "logits": logits.detach()}


def train_sharded(rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    outcomes = []
    for case in cases:
        group = dist.new_group(list(range(dist.get_world_size() - case.spare)))
        if rank >= dist.get_world_size() - case.spare:
            continue
        torch.manual_seed(rank)
        model = sharded(case, group)
        assert isinstance(model.module.bags, ShardedTTEmbeddingBagCollection)
        share_of = partial(share, rank=rank, case=case, world=group.size())
        outcomes.append(train(model, case, group.size(), share_of))
    return outcomes


MIXED = ("row_wise", "table_wise", "data_parallel")
CASES = {  # of each number of processes
    2: [
        *(Case((kind,), weighted=True) for kind in KINDS),
        *(Case((kind,), varies=True, dense=dense) for kind in KINDS for dense in (True, False)),
        Case(MIXED, weighted=True, varies=True),
        Case(MIXED),
        Case(MIXED, truncates=True),
        *(Case(MIXED, objective=name) for name in ("budget", "achievement")),
    ],
    3: [Case(MIXED, spare=1)],
    4: [
        *(Case((kind,)) for kind in KINDS),
        Case(("table_wise", "data_parallel", "row_wise")),
        *(Case(("table_wise",), objective=name) for name in ("budget", "achievement")),  # one process has no TT table
    ],
}


@pytest.mark.parametrize("processes", CASES)
def test_losses_gradients_and_parameters_are_those_of_one_process(processes: int) -> None:
    of_processes = run(processes, train_sharded, CASES[processes])
    for number, case in enumerate(CASES[processes]):
        world = processes - case.spare
        whole = lambda step, case=case, world=world: joined(global_batch(step, sum(SIZES[:world]), case))  # noqa: E731
        single = train(Model(case), case, world, whole)
        compare([outcomes[number] for outcomes in of_processes[:world]], single, case)


def compare(results: list[dict[str, Tensor]], expected: dict[str, Tensor], case: Case) -> None:
    """Compare what each process has with what one process has."""
    logits = torch.cat([result.pop("logits") for result in results])
    torch.testing.assert_close(logits, expected.pop("logits"), atol=1e-5, rtol=0, msg=lambda error: f"{case}: {error}")
    mean = torch.stack([result.pop("losses") for result in results]).mean(dim=0)
    torch.testing.assert_close(mean, expected.pop("losses"), atol=1e-5, rtol=0, msg=lambda error: f"{case}: {error}")
    for name, value in expected.items():
        parts = [result[name] for result in results if name in result]
        assert parts, f"nobody holds {name}"
        # A divided core is joined; replicas must all be correct.
        shards = [torch.cat(parts, dim=1)] if parts[0].shape != value.shape else parts
        for whole in shards:
            message = lambda error, name=name: f"{case}, {name}: {error}"  # noqa: E731
            torch.testing.assert_close(whole, value, atol=1e-5, rtol=1e-6, msg=message)


def momenta(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
    """The momenta of the leading core of table "two", without a shard's padding."""
    name, parameter = next(each for each in model.named_parameters() if "two.core_0" in each[0])
    whole = model.state_dict()[name]
    width = whole.to_local().shape[1] if hasattr(whole, "to_local") else whole.shape[1]
    state = optimizer.state[parameter]["exp_avg"]
    assert state.stride() == parameter.stride(), "fused optimizers don't ask"
    return state[:, :width].clone()


def step_with_adam(model: nn.Module, step: int) -> torch.optim.Optimizer:
    inner = getattr(model, "module", model)
    optimizer = torch.optim.Adam([p for n, p in inner.named_parameters() if "dense_bags" not in n], lr=LR)
    model(joined(global_batch(step, 4, Case(()))))[0].backward()
    optimizer.step()
    return optimizer


def save(rank: int, case: Case, folder: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)  # values that differ from those of Model's seed
    model = sharded(case)
    optimizer = step_with_adam(model, rank)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer_state(model.module, optimizer)}, checkpoint_id=folder)
    return model(joined(global_batch(0, 4, case)))[1].detach(), momenta(optimizer, model.module)


def load_(model: nn.Module, folder: str) -> tuple[Tensor, Tensor]:
    """Load values and momenta into a model that has taken another step; return its logits and momenta."""
    inner, optimizer = getattr(model, "module", model), step_with_adam(model, 7)
    state = {"model": model.state_dict(), "optimizer": optimizer_state(inner, optimizer)}
    dcp.load(state, checkpoint_id=folder, no_dist=model is inner)
    model.load_state_dict(state["model"])
    load_optimizer_state_(inner, optimizer, state["optimizer"])
    return model(joined(global_batch(0, 4, Case(()))))[1].detach(), momenta(optimizer, inner)


def load_sharded(rank: int, case: Case, folder: str) -> tuple[Tensor, Tensor]:
    return load_(sharded(case), folder)


def test_a_checkpoint_of_four_processes_loads_on_two_on_one_and_dense(tmp_path: Path) -> None:
    """It has the momenta of all parts of a divided core."""
    case = Case(MIXED)
    saved = run(4, save, case, str(tmp_path))
    expected, exact = saved[0][0], torch.cat([each for _, each in saved], dim=1)
    assert not torch.equal(*(each[:, : saved[1][1].shape[1]] for _, each in saved[:2]))
    loaded = run(2, load_sharded, Case(("row_wise", "row_wise", "table_wise")), str(tmp_path))
    assert torch.equal(torch.cat([each for _, each in loaded], dim=1), exact)
    single = Model(case)
    alone = load_(single, str(tmp_path))
    assert torch.equal(alone[1], exact)
    for logits, _ in (*loaded, alone):
        assert torch.allclose(logits, expected, atol=1e-6)
    assert torch.allclose(cr.export_dense(single)(joined(global_batch(0, 4, case)))[1], expected, atol=1e-4)


def test_states_that_do_not_fit_an_optimizer_are_refused() -> None:
    model = Model(Case(MIXED))
    optimizer, fresh = step_with_adam(model, 0), torch.optim.Adam(model.parameters())
    refuse(r"the state lacks 'step' of 'bags\.tt_bags\.two\.core_0': give what", load_optimizer_state_, model, optimizer, {})
    for state in ({}, optimizer_state(model, optimizer)):
        refuse("the Adam has no state yet to load into: let it take a step", load_optimizer_state_, model, fresh, state)


def mistakes(rank: int) -> None:
    """Raise errors of bad batches on all processes, or none where ids may be bad, and look at a shard of a frozen table."""
    bag = cr.TTEmbeddingBag(100, 8, tt_ranks=2, hot_rows=((4, 2),), include_last_offset=True).requires_grad_(False)
    part = RowShard(bag, dist.distributed_c10d._get_default_group(), CPU)
    assert not any(parameter.requires_grad for parameter in part.parameters())
    part.load_state_dict(bag.state_dict())  # of which it takes its rows
    rows = slice(part.first_row, part.first_row + part.num_rows)
    assert torch.equal(part.dense_matrix()[: len(bag.dense_matrix()[rows])], bag.dense_matrix()[rows])
    other = RowShard(cr.TTEmbeddingBag(200, 8, tt_ranks=2, hot_rows=((4, 2),)), dist.distributed_c10d._get_default_group(), CPU)
    refuse("size mismatch for core_0: it has", part.load_state_dict, other.state_dict())
    model = sharded(Case(MIXED))
    for keys, key, bad, message in (
        (FEATURES, "left", 1000, r"id 1000 is out of range for table 'two' \(feature 'left'\)"),
        (FEATURES, "right", 700, r"id 700 is out of range for table 'three' \(feature 'right'\)"),
        (FEATURES, "mean", -1, r"id -1 is out of range for table 'average' \(feature 'mean'\)"),
        (FEATURES[:2], "left", 1, "table 'three' looks up feature 'right', which the batch lacks"),
    ):
        lengths = torch.tensor([int(name == key) for name in keys])
        refuse(message, model, KeyedJaggedTensor(keys, torch.tensor([bad]), lengths=lengths))
    batch = KeyedJaggedTensor(FEATURES, torch.zeros(5).long(), torch.ones(5, requires_grad=True), torch.ones(5).long())
    refuse("keep tables behind feature processors dense", sharded(Case(MIXED, weighted=True)), batch)
    strides = [[1], [0], [0], [0], [0]]
    varying = KeyedJaggedTensor(FEATURES, torch.zeros(5).long(), lengths=torch.tensor([5]), stride_per_key_per_rank=strides)
    refuse("features have different batch sizes: give the KeyedJaggedTensor inverse indices, or", model, varying)
    refuse("tables of 'shared' differ in rows", sharded, Case(MIXED), bounds_check_mode=BoundsCheckMode.IGNORE)
    collection = TTEmbeddingBagCollection([table("tt", 50, 8, "tt", tt_ranks=2), table("dense", 9, 8, "dense")])
    collection.tt_bag("tt").set_row_order_(torch.randperm(50, generator=torch.Generator().manual_seed(rank)))
    lenient = shard(nn.Sequential(collection), {"tt": "data_parallel"}, fused={"bounds_check_mode": BoundsCheckMode.IGNORE})
    (order,) = (buffer for name, buffer in lenient.module.named_buffers() if name.endswith("row_order"))
    first = order.clone()
    dist.broadcast(first, 0)
    assert torch.equal(order, first), "processes look up the same rows"
    batches = [KeyedJaggedTensor(["tt", "dense"], torch.tensor(ids), lengths=torch.ones(2).int()) for ids in ([50, -1], [0, 0])]
    bad, good = (lenient(batch).values() for batch in batches)
    assert torch.equal(bad, good)
    assert lenient.module[0].bounds_check.num_bad_ids == 2
    ordered, turned = (
        lenient(KeyedJaggedTensor(keys, torch.tensor(ids), lengths=torch.ones(2).int())).values()
        for keys, ids in ((["tt", "dense"], [7, 2]), (["dense", "tt"], [2, 7]))
    )
    assert torch.equal(ordered, turned)


def test_bad_batches_are_named_before_ids_are_sent_unless_the_sharder_is_told_to_count_bad_ids_as_row_0() -> None:
    run(2, mistakes)
