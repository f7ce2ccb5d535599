"""Lookups whose cores their optimizer updates in backward, rounded at random in 16 bits; what lookups promise to autograd."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward
from processes import run as run_processes
from refusals import refuse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim import apply_optimizer_in_backward

from comera_rec import TTEmbeddingBag, TTShape
from comera_rec.nn import TiedProjection, TTEmbedding, update_in_backward_
from comera_rec.ops import plan_lookup, tt_bags

SHAPE = TTShape((7, 9), (4, 4), (5,))
IDS = torch.arange(8)[:, None]
STEPS, WIDE = 40, TTShape((3, 2), (32, 32), (8,))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 2**-12}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 2**-9, "initial_accumulator_value": 16.0}),
    "Adam": (torch.optim.Adam, {"lr": 2**-12, "betas": (0.9, 0.9995)}),
}


def table(**options: Any) -> TTEmbeddingBag:
    torch.manual_seed(0)
    return TTEmbeddingBag(63, 16, shape=SHAPE, **options)


def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        ids = torch.randint(model[0].num_embeddings, (40, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        sum((table(ids) * (step + 1)).square().sum() for table in model).backward()
        optimizer.step()


def test_optimizers_that_cannot_update_in_backward_are_refused() -> None:
    model, torchs = nn.ModuleList([table(), table()]), torch.optim.Adagrad
    same_name = type("Adagrad", (torchs,), {})  # but not torch's
    for kind, tables in ((torch.optim.RMSprop, model), (same_name, model), (torchs, nn.ModuleList()), (torchs, table())):
        refuse("no TT table's cores are updated by this", update_in_backward_, tables, kind(model.parameters(), lr=0.1))
    half = table(dtype=torch.float16)  # in which squares of gradients are zero
    refuse("no TT table's cores are updated by this", update_in_backward_, half, torch.optim.Adam(half.parameters()))
    bag = table(hot_rows=[(10, 2)])  # which is registered as a whole or not at all
    refuse("no TT table's cores are updated", update_in_backward_, bag, RowWiseAdagrad(list(bag.cores()), lr=0.1))
    bag(IDS).sum().backward()
    assert bag.core_0.grad is not None


def test_it_can_be_undone_and_redone() -> None:
    model = nn.ModuleList([table(), table()])
    first = torch.optim.Adagrad(model.parameters(), lr=0.1)
    second = torch.optim.Adagrad([{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1}, {"params": model.parameters()}], lr=0.0)
    assert update_in_backward_(model, first) == ["0", "1"]
    train(model, first, steps=1)
    before = copy.deepcopy(model.state_dict())
    assert update_in_backward_(model, None) == []
    train(model, second, steps=1)
    assert all(core.grad is not None for core in model[0].cores())
    update_in_backward_(model, second)
    train(model, second, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_optimizers_that_were_applied_on_the_meta_device_are_not_lost() -> None:
    """DistributedModelParallel gives new parameters to what it doesn't shard, and resets them."""
    bag = table(device="meta")
    apply_optimizer_in_backward(torch.optim.Adagrad, bag.parameters(), {"lr": 0.1})
    refuse("optimizers in backward were applied to TT parameters on", bag.to_empty(device="cpu").reset_parameters)


def test_state_is_converted_with_the_dtype_and_other_ranks_are_refused() -> None:
    model = nn.ModuleList([table(), table()])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    update_in_backward_(model, optimizer)
    train(model, optimizer, steps=1)
    train(model.bfloat16(), optimizer, steps=1)
    state = optimizer.state[model[0].core_0]
    assert state["sum"].dtype == torch.bfloat16
    model[0].resize_ranks_([2])
    message = r"'sum' of a core's optimizer has shape \(1, 7, 4, 5\) where the core has \(1, 7, 4, 2\): load the optimizer's state"
    refuse(message, train, model, optimizer, steps=1)
    assert state["step"] == 2, "a refused step doesn't count"


def train_replicas(rank: int) -> list[torch.Tensor]:
    """Parameters of all processes after some steps, each process with its own ids."""
    model = DistributedDataParallel(nn.Sequential(table()))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    update_in_backward_(model, optimizer)
    for step in range(3):
        ids = torch.randint(63, (8, 2), generator=torch.Generator().manual_seed(10 * rank + step))
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    for replicas in (model, DistributedDataParallel(nn.Sequential(table()))):  # after the first forward, and before it
        replicas.module[0].resize_ranks_([1] * len(replicas.module[0].shape.ranks))
        refuse("TT ranks have changed since DistributedDataParallel wrapped the model", replicas, ids)
    apply_optimizer_in_backward(RowWiseAdagrad, (row_wise := table()).parameters(), {"lr": 0.1})
    refuse("RowWiseAdagrad was applied in backward to cores that Dist", DistributedDataParallel(nn.Sequential(row_wise)), ids)
    return trained


@pytest.mark.distributed
def test_replicas_stay_equal_under_distributed_data_parallel() -> None:
    torch.testing.assert_close(*run_processes(2, train_replicas), rtol=0, atol=0)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        lambda table: TiedProjection(table)(table(torch.arange(8))).square().mean(),
        lambda table: table(torch.arange(8)).square().mean() + table.core_0.mean(),
        lambda table: table.core_0.mean() + table(torch.arange(8)).square().mean(),
    ],
)
def test_a_core_with_a_gradient_from_elsewhere_is_not_stepped_twice(loss: Callable[[TTEmbedding], Tensor], applied: bool) -> None:
    embedding = TTEmbedding(1000, 16, tt_ranks=4)
    if applied:
        _apply_optimizer_in_backward(torch.optim.Adam, embedding.parameters(), {"lr": 0.1})
    else:
        update_in_backward_(embedding, torch.optim.Adagrad(embedding.parameters(), lr=0.1))
    for _ in range(2):
        embedding(torch.arange(8)).sum().backward()
    refuse("a core that is updated in backward has a gradient", loss(embedding).backward)


@pytest.mark.parametrize("old", ["a gradient", "zeros"])
def test_gradients_from_before_the_registration_are_dropped(old: str) -> None:
    bag = table()
    optimizer = torch.optim.Adam(bag.parameters())
    bag(IDS).sum().backward()
    optimizer.step()
    if old == "zeros":
        optimizer.zero_grad(set_to_none=False)
    update_in_backward_(bag, optimizer)
    bag(IDS).sum().backward()
    optimizer.step()
    assert optimizer.state[bag.core_0]["step"] == 2


def test_autograd_sees_that_cores_were_updated() -> None:
    bag = table()
    update_in_backward_(bag, torch.optim.SGD(bag.parameters(), lr=1.0))
    weight = torch.ones_like(bag.core_0).requires_grad_()
    loss = bag(IDS).sum() + (bag.core_0.detach() * weight).sum()
    bag(IDS).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_autograd_leaves_updates_alone() -> None:
    bag, twin = table(hot_rows=[(10, 2)]), table(hot_rows=[(10, 2)])
    for each in (bag, twin):
        update_in_backward_(each, torch.optim.Adam(each.parameters(), lr=0.1))
    for _ in range(3):
        twin(IDS).sum().backward()
        with torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend="aot_eager")):
            bag(IDS).sum().backward()
    torch.testing.assert_close(bag.cores(), twin.cores())


def test_parameters_that_moved_since_forward_are_not_updated_where_they_were() -> None:
    bag = table()
    update_in_backward_(bag, torch.optim.SGD(bag.parameters(), lr=1.0))
    loss = bag(IDS).sum()
    bag.core_0.data = bag.core_0.data.clone(memory_format=torch.preserve_format)
    with pytest.raises(ValueError, match="parameters of TT tables have moved, or their ranks changed, since forward"):
        loss.backward()


def test_two_lookups_of_a_table_update_it_twice() -> None:
    bag, twin = table(), table()
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (bag, twin)]
    for each, optimizer in zip((bag, twin), optimizers, strict=True):
        update_in_backward_(each, optimizer)
    (bag(IDS).sum() + bag(IDS).sum()).backward()
    for _ in range(2):
        twin(IDS).sum().backward()
    assert optimizers[0].state[bag.core_0]["step"] == 2
    torch.testing.assert_close(bag.cores(), twin.cores())


def test_a_table_that_is_given_twice_to_one_lookup_gets_gradients() -> None:
    bag, twin = table(), table()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    update_in_backward_(bag, optimizer)
    ids = torch.randint(63, (2000,))
    plan = plan_lookup([ids, ids.flip(0)], [SHAPE.row_shape] * 2)
    for each in (bag, twin):
        tables = [each.forward_parameters()] * 2
        tt_bags(tables, plan, torch.arange(4001), num_cols=16, features=2).square().mean().backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(bag.named_parameters()), dict(twin.named_parameters()))


def test_tables_in_another_order_are_updated_by_their_own_counts() -> None:
    together, apart = [table(), table()], [table(), table()]
    for tables in (together, apart):
        optimizer = torch.optim.Adam([parameter for each in tables for parameter in each.parameters()], lr=0.1)
        update_in_backward_(nn.ModuleList(tables), optimizer)
        tables[0](IDS).sum().backward()
    for order in ((0, 1), (1, 0)):
        parameters, plan = [together[k].forward_parameters() for k in order], plan_lookup([IDS, IDS], [SHAPE.row_shape] * 2)
        tt_bags(parameters, plan, torch.arange(17), num_cols=16, features=2).sum().backward()
        for each in apart:
            each(IDS).sum().backward()
    torch.testing.assert_close([each.cores() for each in together], [each.cores() for each in apart])


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"impl": "reference"}])
def test_row_wise_adagrad_is_refused_where_slices_cannot_be_updated(options: dict[str, Any]) -> None:
    bag = table(**options)
    refuse("no TT table's cores are updated", update_in_backward_, bag, RowWiseAdagrad(bag.parameters(), lr=0.1))
    apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": 0.1})
    refuse("RowWiseAdagrad in backward works slice by slice: impl 'reference'", bag, IDS)


def test_plans_whose_products_are_out_of_order_are_refused() -> None:
    bag = TTEmbeddingBag(8, 4, shape=TTShape((2, 2, 2), (2, 2, 1), 2), hot_rows=[(4, 1)])
    plan = plan_lookup([torch.tensor([0, 4])], [(2, 2, 2)])
    plan.left[0, :2] = plan.left[0, :2].flip(0)
    refuse("plan holds numbers that", tt_bags, [bag.forward_parameters()], plan, torch.tensor([0, 1, 2]), num_cols=4)


def train_one_row(kind: str, dtype: torch.dtype, value: float) -> tuple[TTEmbeddingBag, torch.optim.Optimizer]:
    """Train on one row, whose gradient is small compared with the numbers of the cores and the optimizer's sums."""
    bag = TTEmbeddingBag(6, 1024, shape=WIDE, dtype=dtype)
    for parameter in bag.parameters():
        nn.init.constant_(parameter, value)
    optimizer = OPTIMIZERS[kind][0](bag.parameters(), **OPTIMIZERS[kind][1])  # type: ignore[call-arg]
    update_in_backward_(bag, optimizer)
    for _ in range(STEPS):
        (bag(torch.tensor([[0]])).float().sum() / (32 * value**2)).backward()
    return bag, optimizer


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in OPTIMIZERS), *((kind, torch.float16) for kind in OPTIMIZERS if kind != "Adam")],
)
def test_small_steps_add_up(kind: str, dtype: torch.dtype) -> None:
    value = 1.0 if dtype == torch.bfloat16 else 8.0
    bag, optimizer = train_one_row(kind, dtype, value)
    exact, optimizer_of_exact = train_one_row(kind, torch.float32, value)
    for core, wide in ((bag.core_0, exact.core_0), (bag.core_1, exact.core_1)):
        states = (optimizer.state[core], optimizer_of_exact.state[wide])
        pairs = [(core, wide)] + [(states[0][name], states[1][name]) for name in states[0] if name != "step"]
        for narrow, expected in pairs:
            assert narrow.dtype == dtype
            mean, true = narrow[:, 0].float().mean().item(), expected[:, 0].mean().item()
            assert abs(mean - true) < 0.5 * torch.finfo(dtype).eps * abs(true)
    moved = value - exact.core_0[:, 0].mean().item()
    assert moved > 1.0 * torch.finfo(dtype).eps * value, "far enough to differ from unchanged cores"
    assert (bag.core_0[:, 1:] == value).all(), "slices that no row uses"


def test_a_seed_repeats_the_rounding() -> None:
    cores = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        cores.append(train_one_row("SGD", torch.bfloat16, 1.0)[0].core_0)
    assert torch.equal(cores[0], cores[1])
    assert not torch.equal(cores[0], cores[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_need_no_rounding_stay(dtype: torch.dtype) -> None:
    """This includes infinities, NaN, and numbers below the smallest normal one."""
    numbers = torch.tensor([0.0, -1.0, 3.5, 2.0**-14, 2.0**-24, -3 * 2.0**-24, float("inf"), float("nan")] * 32).to(dtype)
    bag = TTEmbeddingBag(6, 1024, shape=WIDE, dtype=dtype)
    with torch.no_grad():
        bag.core_0[:, 0] = numbers.view(1, 32, 8)
    update_in_backward_(bag, torch.optim.SGD(bag.parameters(), lr=0.0))
    bag(torch.tensor([[0]])).float().nan_to_num().sum().backward()
    torch.testing.assert_close(bag.core_0[0, 0].flatten(), numbers, rtol=0, atol=0, equal_nan=True)
