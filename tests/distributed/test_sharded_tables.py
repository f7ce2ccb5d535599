"""A sharded table moves as an unsharded one does, by any optimizer and plan; what is refused, sent, saved and truncated."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from in_backward import _apply_optimizer_in_backward, _get_in_backward_optimizers
from processes import run
from refusals import refuse
from sharding import shard
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard as shard_alone
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

import comera_rec as cr
from comera_rec.rank import truncate_ranks_
from comera_rec.recsys.sharding import clip_grad_norm_, optimizer_state, rewrap_data_parallel_

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RowWiseAdagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "TorchRec's SGD": (torchrec.optim.SGD, {"lr": 0.5}),
}
KINDS = {"data_parallel": data_parallel(), "table_wise": table_wise(rank=1), "row_wise": row_wise()}
# All on the meta device, where values are drawn after sharding; one also on CPU.
IN_BACKWARD = [(kind, "meta", name) for kind in KINDS for name in OPTIMIZERS] + [(kind, "cpu", "RowWiseAdagrad") for kind in KINDS]
CASES = {"bags": [*IN_BACKWARD, *((kind, "cpu", "") for kind in KINDS)], "sequences": IN_BACKWARD}  # "": none in backward
CONFIG = cr.TableCompression(tt_ranks=2, min_rows=0)
SENT = list(product(("table_wise", "row_wise"), CASES))


class Model(nn.Module):
    """A swapped collection of one table, whose bags or rows are returned as they come; on all processes alike if it has values."""

    def __init__(self, collection: str, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes: dict[str, Any] = {"name": "t", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["f"]}
        dense: nn.Module = EmbeddingBagCollection([EmbeddingBagConfig(**sizes)], device=torch.device(device))
        if collection == "sequences":
            dense = EmbeddingCollection([EmbeddingConfig(**sizes)], device=torch.device(device))
        self.collection = cr.compress_(dense, tables=CONFIG)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.collection(features)


def look_up(model: nn.Module, ids: Tensor) -> Tensor:
    lengths = torch.ones_like(ids) if len(ids) else torch.zeros(1).long()
    found = model(KeyedJaggedTensor(["f"], ids, lengths=lengths))
    rows: Tensor = found["f"].values() if isinstance(found, dict) else found.values()
    return rows


def ids(process_rank: int, step: int = 0) -> Tensor:
    """Ids of a process: unequal numbers, and in one step none at all."""
    few = [] if step == 1 else [0, 50, 31]
    return torch.tensor([[0, 7, 7, 99], few][process_rank], dtype=torch.int64).add(3 * step) % 100


def rows_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return look_up(model, torch.arange(100))


def train(model: nn.Module, steps: int, processes: list[int], optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Return all rows before the first step and after each."""
    rows, world = [rows_of(model)], dist.get_world_size() if dist.is_initialized() else 1
    for step in range(steps):
        model.zero_grad()
        loss = look_up(model, torch.cat([ids(process, step) for process in processes])).square().sum()
        (loss * world / 2).backward()  # the mean over processes is half the sum over both
        if optimizer is not None:
            optimizer.step()
        rows.append(rows_of(model))
    return rows


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(model.parameters())}], lr=0.05)  # of none, where all are on another process


def by_hand(model: Model, generator: Any, **sharders: Any) -> DistributedModelParallel:
    sharder: Any = cr.TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(**sharders))
    [(name, module)] = [each for each in model.named_modules() if isinstance(each[1], cr.TTEmbeddingBagCollection)]
    plan = ShardingPlan({name: construct_module_sharding_plan(module, {"t": generator}, sharder, 2, 2, "cpu")})
    return DistributedModelParallel(model, plan=plan, sharders=[sharder])


def train_sharded(rank: int, collection: str) -> list[Any]:
    return [train_with(rank, collection, *case) for case in CASES[collection]]


def train_with(rank: int, collection: str, kind: str, device: str, name: str) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """Return the state dict from which training starts, all rows after each step, and those around a step whose rate is zero."""
    model: Any = Model(collection, device)
    torch.manual_seed(rank)
    optimizer: Any = None
    if name:
        kind_of_optimizer, settings = OPTIMIZERS[name]
        _apply_optimizer_in_backward(kind_of_optimizer, model.parameters(), settings | ({"lr": 1.0} if device == "cpu" else {}))
        for each in _get_in_backward_optimizers(model) if device == "cpu" else ():  # as a schedule does, before sharding
            each.param_groups[0]["lr"] = settings["lr"]
        model = shard(model, {"t": kind})
        model.fused_optimizer.init_state()  # steps by zeros, as TorchRec advises before a checkpoint is loaded
        assert not dict(in_backward_optimizer_filter(model.named_parameters())), "no parameter is left to another optimizer"
    else:
        model = by_hand(model, KINDS[kind]).module  # its DistributedDataParallel sees no lookup
        optimizer = plain_sgd(model)
    state = copy.deepcopy(model.state_dict())
    start = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    rows = train(model, 3, [rank], optimizer)
    groups = (model.fused_optimizer if name else optimizer).param_groups
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for group in groups:
        group["lr"] = 0.0
    return start, rows, train(model, 1, [rank], optimizer)


@pytest.mark.parametrize("collection", CASES)
def test_tables_move_as_unsharded_ones_do(collection: str) -> None:
    for case, *results in zip(CASES[collection], *run(2, train_sharded, collection), strict=True):
        model = Model(collection)
        model.load_state_dict({name: value for state, _, _ in results for name, value in state.items()})
        if case[2]:
            optimizer, settings = OPTIMIZERS[case[2]]
            _apply_optimizer_in_backward(getattr(torch.optim, optimizer.__name__, optimizer), model.parameters(), settings)
        expected = train(model, 3, [0, 1], None if case[2] else plain_sgd(model))
        for _, rows, frozen in results:
            for step in range(3):
                torch.testing.assert_close(rows[step + 1], expected[step + 1], atol=1e-5, rtol=1e-4, msg=f"{case} in step {step}")
                assert (rows[step + 1] - rows[step]).abs().max() > 1e-3
            assert torch.equal(*frozen), case


def with_adam(rank: int, kind: str) -> DistributedModelParallel:
    model = Model("bags", "meta")
    torch.manual_seed(rank)
    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.05})
    return shard(model, {"t": kind})


def save(rank: int, folder: str) -> list[list[Tensor]]:
    results = []
    for kind in ("row_wise", "table_wise"):
        model = with_adam(rank, kind)
        train(model, 2, [rank])
        dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=f"{folder}/{kind}")
        results.append(train(model, 1, [rank]))
    return results


def load(rank: int, kinds: tuple[str, str], folder: str) -> list[list[Tensor]]:
    """Load both checkpoints into tables sharded in other ways, and take a step."""
    results = []
    for kind, saved_kind in zip(kinds, ("row_wise", "table_wise"), strict=True):
        model = with_adam(rank + 7, kind)
        state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{saved_kind}")
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])
        results.append(train(model, 1, [rank] if dist.get_world_size() == 2 else [0, 1]))
    return results


def test_state_is_saved_and_loaded_on_any_number_of_processes(tmp_path: Path) -> None:
    expected = run(2, save, str(tmp_path))[0]
    for world, kinds in ((2, ("table_wise", "row_wise")), (1, ("row_wise", "data_parallel"))):
        for results in run(world, load, kinds, str(tmp_path)):
            for found, (before, after) in zip(results, expected, strict=True):
                torch.testing.assert_close(found[0], before, atol=1e-6, rtol=0)
                torch.testing.assert_close(found[1], after, atol=1e-5, rtol=1e-4)


def truncate(rank: int) -> list[Tensor]:
    """Return how the rows of a table move in a step after a truncation, for each sharding type."""
    movements = []
    for kind in KINDS:
        model = with_adam(rank, kind)
        train(model, 1, [rank])
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, cr.TTEmbeddingBag):
                    module.rank_1[1:] = 0.0
        assert not optimizer_state(model.module, model.fused_optimizer)
        assert nn.Parameter(torch.ones(1)) not in model.fused_optimizer.state
        truncate_ranks_(model, model.fused_optimizer, threshold=1e-3)
        rewrap_data_parallel_(model)
        before, after = train(model, 1, [rank])
        shapes = {tuple(value["exp_avg"].shape) for value in model.fused_optimizer.state.values()}
        assert shapes == {tuple(getattr(value, "shape", ())) for value in model.state_dict().values()}
        movements.append(after - before)
    return movements


def test_tables_learn_after_their_ranks_were_truncated() -> None:
    for first, second in zip(*run(2, truncate), strict=True):
        assert first.abs().max() > 1e-3
        torch.testing.assert_close(first, second)


class Tied(Model):
    """Scores all rows by the bags: the table is also used outside of the lookup."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.collection(features).values() @ self.collection.tt_bags["t"].dense_matrix().T


def score_all(rank: int) -> list[Tensor]:
    model = by_hand(Tied("bags"), KINDS["data_parallel"])
    features = KeyedJaggedTensor(["f"], ids(rank), lengths=torch.ones_like(ids(rank)))
    for _ in range(3):
        (model(features).square().sum() * (rank + 1)).backward()
        plain_sgd(model).step()
    return [parameter.detach() for parameter in model.parameters()]


def test_replicas_that_are_used_outside_of_the_lookup_stay_equal() -> None:
    torch.testing.assert_close(*run(2, score_all), rtol=0, atol=0)


def clip(rank: int) -> list[Tensor]:
    norms = []  # before and after clipping, for each sharding type
    for kind in KINDS.values():
        model = by_hand(Model("bags"), kind)
        look_up(model, ids(rank)).square().sum().backward()
        norms += [clip_grad_norm_(model, 0.1), clip_grad_norm_(model, 1.0)]
    return norms


def test_gradients_are_clipped_by_the_norm_of_all_processes() -> None:
    whole = Model("bags")
    (look_up(whole, torch.cat([ids(0), ids(1)])).square().sum() / 2).backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
    for norms in run(2, clip):
        torch.testing.assert_close(norms, [norm, torch.tensor(0.1)] * len(KINDS))


def frozen_and_refused(rank: int) -> None:
    for kind, generator in KINDS.items():
        model = Model("bags")
        whole = cr.compression_report(model).to_dict()
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
        sharded = by_hand(model.requires_grad_(False), generator)
        before = rows_of(sharded)
        nn.Linear(8, 1)(look_up(sharded, ids(rank))).sum().backward()  # which sends gradients to the processes that have tables
        assert torch.equal(rows_of(sharded), before)
        report = cr.compression_report(sharded).to_dict()
        assert (report["params"], report["ratio"]) == (whole["params"], whole["ratio"]) or kind == "table_wise"
        refuse("the model is sharded: load its state into the model as it was before", cr.export_dense, sharded)
    for message, way in (
        ("table 't': TT tables don't support sharding type 'column_wise': choose one", column_wise(ranks=[0, 1])),
        ("table 't': the plan gives it to process 2, but there are 2: choose one from 0 to 1", table_wise(rank=2)),
        ("table 't': TT tables have no compute kernel 'fused_uvm': leave compute_kernel out", row_wise(compute_kernel="fused_uvm")),
        (r"table 't' has SGD with \{'lr': 0.1, 'momentum': 0.9\} in backward, which sharded TT", torch.optim.SGD),
        (r"table 't' has LAMB with \{'lr': 0.1, 'momentum': 0.9\} in backward, which sharded TT", torchrec.optim.LAMB),
    ):
        model = Model("bags")
        if isinstance(way, type):
            _apply_optimizer_in_backward(way, model.parameters(), {"lr": 0.1, "momentum": 0.9})
        refuse(message, by_hand, model, row_wise() if isinstance(way, type) else way)


def train_16_bits(rank: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return all rows after each step, and the parameters that all processes have."""
    model: Any = Model("bags").to(dtype)
    _apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.02})
    model = shard(model, {"t": kind})
    rows = torch.stack(train(model, 4, [rank]))
    shared = {"data_parallel": ("core_0", "core_1", "rank_1"), "row_wise": ("core_1", "rank_1"), "table_wise": ()}[kind]
    return rows, [each.detach() for name, each in model.named_parameters() if name.endswith(shared)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_16_bits_move_nearly_as_float32_ones_and_replicas_alike(kind: str, dtype: torch.dtype) -> None:
    (one, shared), (other, shared_too) = run(2, train_16_bits, kind, dtype)
    (exact, _), _ = run(2, train_16_bits, kind, torch.float32)
    assert torch.equal(one, other)
    assert len(shared) == len(shared_too) == {"data_parallel": 3, "row_wise": 2, "table_wise": 0}[kind]
    assert all(map(torch.equal, shared, shared_too))
    assert (one.float() - exact).norm() < 0.1 * (exact - exact[0]).norm()


def test_frozen_tables_are_looked_up_and_plans_and_optimizers_that_tables_cannot_follow_are_refused() -> None:
    run(2, frozen_and_refused)


def names_and_order(rank: int) -> Tensor:
    torch.manual_seed(rank)
    sharder: Any = cr.TTEmbeddingBagCollectionSharder()
    for kind in ("data_parallel", "row_wise"):
        small = EmbeddingBagConfig(name="small", num_embeddings=9, embedding_dim=8)
        configs = Model("bags").collection.embedding_bag_configs()  # type: ignore[operator]
        model: Any = nn.ModuleDict({"bags": cr.TTEmbeddingBagCollection([*configs, small])})
        before = copy.deepcopy(model.state_dict())
        model["bags"] = shard_alone(model["bags"], {"t": KINDS[kind], "small": table_wise(rank=0)}, sharder=sharder)
        assert list(model.state_dict()) == list(before)
        for part in model.state_dict()["bags.dense_bags.embedding_bags.small.weight"].local_shards():
            assert torch.equal(part.tensor, before["bags.dense_bags.embedding_bags.small.weight"])
    plan = dict.fromkeys(("t", "small"), data_parallel())
    tables = shard_alone(cr.TTEmbeddingBagCollection([*configs, small]), plan, sharder=sharder)
    return tables.state_dict()["dense_bags.embedding_bags.small.weight"]


def test_torchrecs_composable_sharding_keeps_names_their_order_and_values() -> None:
    assert torch.equal(*run(2, names_and_order))


def rows_and_gradients(kind: str, collection: str, precision: CommType) -> tuple[Tensor, Tensor]:
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    model = by_hand(Model(collection), KINDS[kind], qcomm_codecs_registry=codecs)
    rows = look_up(model, ids(dist.get_rank()))
    rows.square().sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return rows.detach(), torch.cat([torch.zeros(0), *gradients])


def exact_and_rounded(rank: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[rows_and_gradients(*case, precision) for precision in (CommType.FP32, CommType.FP16)] for case in SENT]


def test_what_is_sent_is_quantized_as_the_codecs_say() -> None:
    for case, *processes in zip(SENT, *run(2, exact_and_rounded), strict=True):
        for exact, rounded in processes:
            assert not torch.equal(exact[0], rounded[0]), case
            torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-3)
        gradients = [torch.cat([each[1] for each in of_precision]) for of_precision in zip(*processes, strict=True)]
        assert not torch.equal(*gradients), case
