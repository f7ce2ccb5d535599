"""Plans of tensor trains beside dense tables."""

from __future__ import annotations

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardingPlan

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys import TTEmbeddingBagConfig as Table
from comera_rec.recsys.sharding.planner import count_bytes

KINDS = ("data_parallel", "table_wise", "row_wise")


def model(*tables: Table) -> nn.Module:
    return nn.Sequential(TTEmbeddingBagCollection(tables, device="meta"))


def table(name: str, rows: int, tt_ranks: int | None = None, dim: int = 64) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], tt_ranks=tt_ranks)


def plan(of: nn.Module, *, world_size: int = 2, batch: int = 1024, ddr_cap: int = 16 << 30, **constraints: str) -> ShardingPlan:
    only = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in constraints.items()}
    topology = Topology(world_size=world_size, compute_device="cpu", ddr_cap=ddr_cap)
    return cr.TTShardingPlanner(topology, batch, constraints=only).plan(of, [cr.TTEmbeddingBagCollectionSharder()])


def test_tables_of_both_kinds_share_one_plan() -> None:
    placed = plan(model(table("users", 1_000_000, 8), table("dense", 1000))).plan["0"]
    assert set(placed) == {"users", "dense"}
    assert placed["users"].compute_kernel == "customized_kernel"
    assert placed["dense"].compute_kernel != "customized_kernel"


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_hold(kind: str) -> None:
    placed = plan(model(table("users", 1_000_000, 8)), users=kind).plan["0"]["users"]
    assert placed.sharding_type == kind

    assert len(placed.ranks) == (1 if kind == "table_wise" else 2)


def test_a_sharding_type_that_divides_columns_is_refused() -> None:
    with pytest.raises(PlannerError, match=r"table 'users': none of the sharding types \['column_wise'\] suits a tensor train"):
        plan(model(table("users", 1_000_000, 8)), users="column_wise")


def test_trains_fit_where_their_dense_tables_do_not() -> None:
    tables = [(f"t{k}", 5_000_000) for k in range(3)]
    room = 2 << 30  # a device; a dense table takes 1.2 GiB and its optimizer state
    with pytest.raises(PlannerError, match=r"'t\d' takes .* GiB .* make it a tensor train"):
        plan(model(*(table(name, rows) for name, rows in tables)), ddr_cap=room, world_size=1)
    placed = plan(model(*(table(name, rows, 16) for name, rows in tables)), ddr_cap=room, world_size=1).plan["0"]
    assert set(placed) == {name for name, _ in tables}


def test_a_train_that_does_not_fit_is_told_to_shrink() -> None:
    with pytest.raises(PlannerError, match=r"'users' takes .* of a device .*: give it lower ranks or a higher order"):
        plan(model(table("users", 10_000_000, 64)), ddr_cap=1 << 20)


def test_replicas_are_cheaper_the_larger_the_batch() -> None:
    """All-reduced cores don't grow with the batch; bags do."""
    shape = cr.TTShape.for_table(1_000_000, 64, tt_ranks=8)
    sent = {
        kind: [
            count_bytes(kind, shape, 64, 1, batch, batch, 4)["bags"] * 2
            + count_bytes(kind, shape, 64, 1, batch, batch, 4)["gradients"]
            for batch in (64, 65_536)
        ]
        for kind in KINDS
    }
    assert sent["data_parallel"][0] == sent["data_parallel"][1]
    assert sent["data_parallel"][0] > sent["table_wise"][0]
    assert sent["data_parallel"][1] < sent["table_wise"][1]
    of = model(table("users", 1_000_000, 8))
    assert plan(of, world_size=4, batch=65_536).plan["0"]["users"].sharding_type == "data_parallel"
