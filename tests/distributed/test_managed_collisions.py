"""TorchRec's managed collisions number ids of any size; TT tables behind them are sharded as TorchRec shards dense ones."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from foreign_programs import managed_collisions
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward
from processes import run
from refusals import refuse
from sharding import shard
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

import comera_rec as cr
from comera_rec.recsys import TTEmbeddingBagConfig as Table

pytestmark = pytest.mark.distributed

LR = 0.02
FEATURES = ["user", "item"]
STEPS = 6


@dataclass(frozen=True)
class Case:
    is_tt: bool = True
    hot: bool = False  # rows
    varies: bool = False  # batch sizes by feature


def tables(case: Case) -> list[Table]:
    """Of few rows, so that ids are evicted; each process has the same rows of TT tables as of dense ones."""
    own: dict[str, Any] = {"tt_ranks": 3, "hot_rows": ((24, 4),) if case.hot else ()} if case.is_tt else {}
    return [
        Table(name="people", num_embeddings=32, embedding_dim=8, feature_names=["user"], pooling=PoolingType.MEAN, **own),
        Table(name="products", num_embeddings=64, embedding_dim=16, feature_names=["item"], **own),
    ]


class Model(nn.Module):
    def __init__(self, case: Case, *, managed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        kept: Any = cr.TTEmbeddingBagCollection(tables(case))
        self.over = nn.Linear(24, 1)
        if not case.is_tt:
            kept = EmbeddingBagCollection([config.dense() for config in tables(case)])
        self.sparse: nn.Module = kept
        if managed:
            collisions = managed_collisions(kept.embedding_bag_configs(), interval=2, buckets=1 if case.is_tt else 2)
            self.sparse = ManagedCollisionEmbeddingBagCollection(kept, collisions, return_remapped_features=not case.varies)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Any]:
        found = self.sparse(features)
        pooled, remapped = found if isinstance(found, tuple) else (found, None)
        return self.over(pooled.values()).tanh(), remapped


def batch(step: int, process_rank: int, case: Case) -> KeyedJaggedTensor:
    """Three samples of one process; ids differ more and more from those of the first steps."""
    generator = torch.Generator().manual_seed(2 * step + process_rank)
    lengths = torch.randint(0, 4, (6,), generator=generator)
    ids = 8 * step + torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    values = 10**12 + 7 * ids + ids % 2 * 2**62  # TorchRec's process 1 numbers the upper half of ids
    if not case.varies:
        return KeyedJaggedTensor(FEATURES, values, lengths=lengths)
    inverse_indices = (FEATURES, torch.tensor([[0, 0, 0], [0, 1, 2]]))  # the first user's bag, for all
    user = int(lengths[0])
    values = torch.cat([values[:user], values[int(lengths[:3].sum()) :]])
    lengths = torch.cat([lengths[:1], lengths[3:]])
    return KeyedJaggedTensor(FEATURES, values, lengths=lengths, stride_per_key_per_rank=[[1], [3]], inverse_indices=inverse_indices)


def joined(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    bags = [each[key] for key in FEATURES for each in batches]
    values, lengths = (torch.cat([getattr(bag, of)() for bag in bags]) for of in ("values", "lengths"))
    return KeyedJaggedTensor(FEATURES, values, lengths=lengths)


def train(model: nn.Module, batches: list[KeyedJaggedTensor], world: int) -> tuple[list[float], list[Any]]:
    """Train a step on each batch; return losses, which add up over processes, and the numbered ids."""
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    optimizer = torch.optim.SGD(inner.parameters(), lr=LR)
    losses, ids = [], []
    for features in batches:
        scores, remapped = model(features)
        loss = scores.square().sum()
        optimizer.zero_grad()
        (loss * world).backward()  # averaged over processes
        optimizer.step()
        losses.append(float(loss.detach()))
        ids.append(remapped.wait() if hasattr(remapped, "wait") else remapped)
    return losses, ids


def train_sharded(process_rank: int, case: Case) -> tuple[list[float], list[Any]]:
    fused = {"learning_rate": LR}
    if case.is_tt:
        model = shard(Model(case), dict.fromkeys(("people", "products"), "row_wise"), fused=fused)
    else:  # by hand, because TorchRec's planner has no plan for CPUs
        dense, sharder = Model(case), ManagedCollisionEmbeddingBagCollectionSharder(fused_params=fused)
        types = dict.fromkeys(("people", "products"), row_wise(compute_kernel="fused"))
        plan = construct_module_sharding_plan(dense.sparse, types, sharder, local_size=2, world_size=2, device_type="cpu")
        model = DistributedModelParallel(dense, plan=ShardingPlan({"sparse": plan}), sharders=[sharder])
    return train(model, [batch(step, process_rank, case) for step in range(STEPS)], 2)


def test_ids_are_those_of_dense_tables_and_losses_those_of_one_process_with_these_ids() -> None:
    results = run(2, train_sharded, Case())
    for (_, ids), (_, dense_ids) in zip(results, run(2, train_sharded, Case(is_tt=False)), strict=True):
        for numbered, expected in zip(ids, dense_ids, strict=True):
            assert all(torch.equal(numbered[key].values(), expected[key].values()) for key in FEATURES)
    numbered = [joined([ids[step] for _, ids in results]) for step in range(STEPS)]
    rows = torch.cat([each["user"].values() for each in numbered]).unique()
    assert min(rows) < 16 <= max(rows)
    expected_losses, _ = train(Model(Case(), managed=False), numbered, 1)
    found = torch.tensor([losses for losses, _ in results]).sum(0)
    torch.testing.assert_close(found, torch.tensor(expected_losses), atol=1e-5, rtol=0)


def score_both_forms(process_rank: int) -> tuple[Tensor, Tensor]:
    """Train on features whose batch sizes vary; then score such a batch, and the same with its bags repeated."""
    case = Case(varies=True)
    model = shard(Model(case), {})
    train(model, [batch(step, process_rank, case) for step in range(STEPS)], 2)
    model.eval()  # ids keep their numbers
    varying = batch(1, process_rank, case)
    user, item = varying["user"], varying["item"]
    repeated = KeyedJaggedTensor(
        FEATURES, torch.cat([user.values().repeat(3), item.values()]), lengths=torch.cat([user.lengths().repeat(3), item.lengths()])
    )
    return model(varying)[0].detach(), model(repeated)[0].detach()


def test_batch_sizes_may_vary_by_feature() -> None:
    for varying, repeated in run(2, score_both_forms):
        assert varying.shape == (3, 1)
        torch.testing.assert_close(varying, repeated)


def evict(process_rank: int, optimizer: type[torch.optim.Optimizer]) -> tuple[Tensor, Tensor, Tensor]:
    """Return which hot rows, and which of their optimizer states, are zero after the first ids got rows; and these rows."""
    model = Model(Case(hot=True))
    _apply_optimizer_in_backward(optimizer, model.sparse.parameters(), {"lr": LR})
    sharded = shard(model, {})
    managed = sharded.module.sparse
    hot = managed._embedding_module.tt_bags["people"].hot_rows[0].core_0
    state = hot._in_backward_optimizers[0].state[hot]["sum"]
    with torch.no_grad():
        hot.fill_(1)
        state.fill_(1)
    for step in range(2):
        sharded(batch(step, process_rank, Case()))
    # Modules that number ids by hashes say None where only other processes had evictions.
    managed._reset_hot_rows({"people": None if process_rank else torch.arange(0)})
    ids = managed._managed_collision_collection._managed_collision_modules["people"]
    rows = ids._mch_remapped_ids_mapping[ids._mch_sorted_raw_ids < torch.iinfo(torch.int64).max]
    return (hot == 0).all(dim=(0, 2, 3)), (state.view(24, -1) == 0).all(dim=1), rows


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, RowWiseAdagrad])
def test_hot_rows_of_new_ids_are_zero_on_all_processes(optimizer: type[torch.optim.Optimizer]) -> None:
    results = run(2, evict, optimizer)
    rows = torch.cat([rows for *_, rows in results])
    expected = torch.zeros(24, dtype=torch.bool)
    expected[rows[rows < 24]] = True
    assert {int(row) // 16 for row in rows} == {0, 1}
    assert not expected.all()
    for hot, state, _ in results:
        assert torch.equal(hot, expected)
        assert torch.equal(state, expected)


def mistakes(process_rank: int) -> None:
    dense, ordered, kinds, weighted = (Model(Case()) for _ in range(4))
    weighted.sparse._embedding_module = cr.TTEmbeddingBagCollection(tables(Case()), is_weighted=True)
    refuse("TorchRec's sharded managed collisions drop the weights of ids", shard, weighted, {})
    dense.sparse._embedding_module = cr.TTEmbeddingBagCollection([tables(Case())[0], tables(Case(is_tt=False))[1]])
    refuse("table 'products' is dense, in a managed collision module with TT tables, which is shar", shard, dense, {})
    ordered.sparse._embedding_module.tt_bag("people").set_row_order_(torch.arange(32).flip(0))
    refuse("table 'people' has a row order, but managed collisions choose the rows of ids", shard, ordered, {})
    with pytest.raises(PlannerError, match=r"^table 'products': "):
        shard(kinds, {"products": "table_wise"})
    names = set(Model(Case()).state_dict())
    assert set(shard(Model(Case()), {}).module.state_dict()) == names


def test_what_cannot_be_sharded_is_named() -> None:
    run(1, mistakes)
