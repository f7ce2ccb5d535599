"""Plans for TT tables and dense tables together: what they follow, refuse and count."""

import pytest
import torch
from foreign_programs import managed_collisions
from processes import run
from refusals import refuse
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding.planner import TTEnumerator


def model(*tables: Table) -> nn.Module:
    return nn.Sequential(TTEmbeddingBagCollection(tables, device="meta"))


def table(name: str, rows: int, tt_ranks: int | None = None, dim: int = 64) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], tt_ranks=tt_ranks)


def plan(of: nn.Module, *, world_size: int = 2, batch: int = 1024, ddr_cap: int = 16 << 30, **constraints: str) -> ShardingPlan:
    only = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in constraints.items()}
    topology = Topology(world_size=world_size, compute_device="cpu", ddr_cap=ddr_cap)
    return cr.TTShardingPlanner(topology, batch, constraints=only).plan(of, [cr.TTEmbeddingBagCollectionSharder()])


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise"])
def test_tables_of_both_kinds_share_one_plan_that_follows_constraints(kind: str) -> None:
    placed = plan(model(table("users", 1_000_000, 8), table("dense", 1000)), users=kind).plan["0"]
    assert placed["users"].sharding_type == kind
    assert len(placed["users"].ranks) == (1 if kind == "table_wise" else 2)
    assert placed["users"].compute_kernel == "customized_kernel"
    assert placed["dense"].compute_kernel != "customized_kernel"


@pytest.mark.parametrize(("tables", "rows", "kind"), [(2, 30_000, "data_parallel"), (26, 1_000_000, "table_wise")])
def test_tables_are_replicated_where_that_costs_less_than_exchanging_bags(tables: int, rows: int, kind: str) -> None:
    placed = plan(model(*(table(f"t{k}", rows, 16, dim=16) for k in range(tables))), batch=2048).plan["0"]
    assert {each.sharding_type for each in placed.values()} == {kind}


def test_what_is_no_plan_for_tt_tables_is_refused() -> None:
    users, topology = model(table("users", 1_000_000, 8)), Topology(world_size=2, compute_device="cpu")
    sharder = cr.TTEmbeddingBagCollectionSharder()
    stock = EmbeddingShardingPlanner(topology=topology, storage_reservation=FixedPercentageStorageReservation(0.15))
    with pytest.raises(PlannerError, match=r"table 'users': none of the sharding types \['column_wise'\] suits a TT table"):
        plan(users, users="column_wise")
    refuse("make the plan with TTShardingPlanner", stock.plan, users, [sharder])
    refuse("the TT tables of '0' have no sharder: add TTEmb", cr.TTShardingPlanner(topology).plan, users, get_default_sharders())
    refuse("the enumerator knows no TT tables", cr.TTShardingPlanner, topology, enumerator=EmbeddingEnumerator(topology, 8))
    positions = PositionWeightedModuleCollection({"f_t": 3})
    processed = FeatureProcessedEmbeddingBagCollection(TTEmbeddingBagCollection([table("t", 100, 2)], is_weighted=True), positions)
    refuse("model has feature processors, which sharded TT tables send no gradients: keep", plan, processed)
    tower = nn.Sequential(EmbeddingTower(users[0], nn.Linear(64, 1)))
    sharders = [sharder, EmbeddingTowerSharder()]
    refuse("0 has TT tables, which EmbeddingTowerSharder can't shard: leave", cr.TTShardingPlanner(topology).plan, tower, sharders)
    assert cr.TTShardingPlanner(topology).plan(tower, [sharder]).plan.keys() == {"0.embedding"}
    fused = nn.Sequential(TTEmbeddingBagCollection([table("t", 100, 2), table("s", 9)]))
    fuse_embedding_optimizer(fused, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    refuse("dense tables are a FusedEmbeddingBagCollection, which isn't sharded: don't fuse them", plan, fused)
    refuse("over groups of processes that are replicas", sharder.shard, users[0], {}, object.__new__(ShardingEnv2D))


def planned(process_rank: int, rows: int) -> str:
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=1 << 30)
    try:
        found = cr.TTShardingPlanner(topology).collective_plan(model(table("users", 1000, 8), table("dense", rows)))
    except PlannerError as error:
        return str(error).partition(":")[0]
    return found.plan["0"]["users"].sharding_type


@pytest.mark.distributed
def test_all_processes_get_the_plan_or_the_error() -> None:
    assert run(2, planned, 1000) == ["data_parallel"] * 2
    assert run(2, planned, 100_000_000) == ["the tables don't fit"] * 2


def test_managed_collisions_over_tt_tables_need_a_sharder() -> None:
    tables = [table("users", 1000, 8)]
    collisions = managed_collisions(tables)
    managed = nn.ModuleDict({"sparse": ManagedCollisionEmbeddingBagCollection(TTEmbeddingBagCollection(tables), collisions)})
    sharder, name = cr.TTEmbeddingBagCollectionSharder(), "sparse._embedding_module"
    message = "sparse is a managed collision module: give TTManagedCollision"
    refuse(message, plan, managed)
    refuse(message, sharder.shard, managed.get_submodule(name), None, None, module_fqn=name)
    sequences = cr.TTEmbeddingCollection([cr.TTEmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])])
    managed["sparse"] = ManagedCollisionEmbeddingCollection(sequences, managed_collisions(sequences.embedding_configs()))
    planner, sharders = cr.TTShardingPlanner(Topology(world_size=2, compute_device="cpu"), 8), [sharder, *get_default_sharders()]
    refuse("sparse is a managed collision module of sequences", planner.plan, managed, sharders)


def test_the_error_names_the_largest_tables_their_sizes_and_the_room() -> None:
    tables = [table("a", 5_000_000), *(table(f"b{k}", 100_000 * k, 8 if k == 2 else None) for k in (1, 3, 2, 4))]
    names = r"'a' takes 1\.\d+ GiB, 'b4' takes 0\.\d+ GiB, 'b3' takes 0\.\d+ GiB"
    with pytest.raises(PlannerError, match=rf"^the tables don't fit: {names} of a device .*, and a device has 0.85 GiB for all of"):
        plan(model(*tables), world_size=1, ddr_cap=1 << 30)


def option(config: Table, constraint: ParameterConstraints | None = None, **arguments: int) -> ShardingOption:
    """The table-wise sharding option on two processes."""
    constraints = {config.name: constraint} if constraint else None
    enumerator = TTEnumerator(Topology(world_size=2, compute_device="cpu"), 1024, constraints, **arguments)
    options = enumerator.enumerate(model(config), [cr.TTEmbeddingBagCollectionSharder()])
    return next(each for each in options if each.sharding_type == "table_wise")


TWO = table("users", 1_000_000, 8).with_changes(feature_names=["clicked", "bought"])


def test_every_feature_of_a_constrained_table_counts() -> None:
    free = option(TWO)
    for factors, expected in ([1.0], [1.0, 1.0]), ([3.0], [3.0, 3.0]), ([3.0, 20.0], [3.0, 20.0]):
        constrained = option(TWO, ParameterConstraints(sharding_types=["table_wise"], pooling_factors=factors))
        assert constrained.input_lengths == expected
        same = constrained.shards[0].storage.ddr == free.shards[0].storage.ddr
        assert same == (sum(expected) == 2), "storage follows the ids"
    with pytest.raises(PlannerError, match="'users' has 2 features and its constraint 3 pooling_factors: give one per feature"):
        option(TWO, ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0]))


def test_storage_counts_the_optimizers_states_and_the_tables_type() -> None:
    cores = TWO.tt_shape().num_params
    by_states = [option(TWO, optimizer_states=states).shards[0].storage.ddr for states in (0, 1, 2)]
    assert by_states[1] - by_states[0] == by_states[2] - by_states[1] == 4 * cores
    half = option(TWO.with_changes(data_type=DataType.FP16))  # by default with Adam's states
    assert by_states[2] - half.shards[0].storage.ddr == (4 - 2) * 4 * cores, "weights, gradients and two states of two bytes each"
