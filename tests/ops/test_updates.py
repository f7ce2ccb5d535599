"""Optimizers applied in backward, slice by slice, agree with their formulas in plain torch: parameters and state after batches."""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from bag_tables import every_order, pool, tables_of
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward, param_to_optim_hook_handle_map
from refusals import refuse
from torch import Tensor, nn

from comera_rec.ops.bags.updates import _rounded_at_random, init_state_, step_
from comera_rec.tt import TTShape, row_digits

SHAPES = {
    2: [TTShape((7, 6), (4, 4), (5,)), TTShape((3, 8), (4, 4), (2,))],
    3: [TTShape((4, 5, 3), (2, 2, 4), (3, 6)), TTShape((2, 3, 6), (2, 2, 4), (4, 1))],
    4: [TTShape((3, 4, 2, 5), (2, 1, 3, 2), (4, 5, 3)), TTShape((2, 2, 3, 3), (2, 1, 3, 2), (1, 2, 2))],
}
HOT_ROWS: tuple[tuple[int, int], ...] = ((4, 3), (2, 2))  # of the first table; some are used by every other batch
EMPTY = 4  # the batch that has no ids
EPS = {"eps": 1e-2}  # large compared with rounding errors of zero gradients
SGD, ADAGRAD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW
CASES = {
    "SGD": (SGD, {"lr": 0.05}),
    "SGD, weight decay": (SGD, {"lr": 0.05, "weight_decay": 0.3}),
    "Adagrad": (ADAGRAD, {"lr": 0.1, **EPS}),
    "Adagrad, lr decay, initial sums": (ADAGRAD, {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.75, **EPS}),
    "Adagrad, weight decay": (ADAGRAD, {"lr": 0.1, "weight_decay": 0.3, **EPS}),
    "Adam": (ADAM, {"lr": 0.02, "betas": (0.8, 0.95), **EPS}),
    "Adam, weight decay": (ADAM, {"lr": 0.02, "betas": (0.9, 1 - 1e-8), "weight_decay": 0.3, **EPS}),
    "AdamW": (ADAMW, {"lr": 0.02, "weight_decay": 0.3, **EPS}),
    "row-wise Adagrad": (RowWiseAdagrad, {"lr": 0.1, **EPS}),
    "row-wise Adagrad, all settings": (
        RowWiseAdagrad,
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.3, "initial_accumulator_value": 0.75, **EPS},
    ),
}
every_case = pytest.mark.parametrize(("kind", "settings"), CASES.values(), ids=CASES.keys())
ALL_SUM = "all", "sum"
WAYS = [(*ALL_SUM, torch.float32), ("cores", "mean", torch.float32), ("all", "max", torch.float32)]


class Batch(NamedTuple):
    """Jagged bags of two features, with ids in no bag, and the gradient of the pooled rows."""

    ids: list[Tensor]
    offsets: Tensor
    weights: Tensor
    gradient: Tensor


def make_tables(order: int, dtype: torch.dtype = torch.float32, shapes: Sequence[TTShape] | None = None) -> nn.ModuleList:
    return tables_of(shapes or SHAPES[order], dtype=dtype, hot_rows=[HOT_ROWS])


def make_batches(tables: nn.ModuleList, count: int = 6, lookups: int = 30, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Draw batches with few leading digits, each with others than the last, and numbers that the type can represent."""
    batches = []
    for step in range(count):
        of_table = lookups if step != EMPTY else 0
        ids = [(torch.rand(of_table) * 0.6 * table.num_embeddings).long() for table in tables]
        ids = [low if step % 2 else table.num_embeddings - 1 - low for table, low in zip(tables, ids, strict=True)]
        total = of_table * len(tables)
        offsets = torch.cat([torch.tensor([0]), torch.randint(max(1, total - 3), (10 * len(tables),)).sort().values])
        weights, gradient = torch.rand(total) + 0.5, torch.randn(10, len(tables) * tables[0].embedding_dim)
        batches.append(Batch(ids, offsets, weights.to(dtype).float(), gradient.to(dtype).float()))
    return batches


def look_up(tables: nn.ModuleList, batch: Batch, *, impl: str = "auto", mode: str = "sum", **arguments: Any) -> Tensor:
    weights = batch.weights.to(tables[0].core_0.dtype) if mode == "sum" else None
    how = {"impl": impl, "mode": mode, "per_sample_weights": weights, "features": len(tables)}
    return pool(tables, batch.ids, batch.offsets, **how, **arguments)


def differentiate(tables: nn.ModuleList, batch: Batch, mode: str = "sum") -> list[Tensor]:
    """Gradients of all parameters by definition, and of weights that need them."""
    out, weights = look_up(tables, batch, impl="reference", mode=mode), [batch.weights] if batch.weights.requires_grad else []
    return list(torch.autograd.grad(out, [*tables.parameters(), *weights], batch.gradient.to(out.dtype)))


def backward(tables: nn.ModuleList, batch: Batch, **arguments: Any) -> None:
    out = look_up(tables, batch, **arguments)
    out.backward(batch.gradient.to(out.dtype))


def masks(tables: nn.ModuleList, batch: Batch) -> list[Tensor]:
    """Masks, shaped like all parameters, of the slices that the batch uses; every row uses the diagonals."""
    used = []
    for table, ids in zip(tables, batch.ids, strict=True):
        digits = row_digits(ids, table.shape.row_shape)
        for core, core_digits in zip(table.cores(), digits, strict=True):
            is_used = torch.zeros(core.shape[1], dtype=torch.bool).index_fill(0, core_digits, True)
            used.append(is_used.view(1, -1, 1, 1).expand(core.shape))
        used += [torch.ones_like(rank, dtype=torch.bool) for rank in table.rank_parameters()]
        for block in table.hot_blocks():
            rows = torch.zeros(block.num_rows, dtype=torch.bool)
            rows[ids[(ids >= block.first) & (ids < block.first + block.num_rows)] - block.first] = True
            used += [rows.view(1, -1, 1, 1).expand(block.core_0.shape), rows.any().expand(block.core_1.shape)]
            used += [torch.ones_like(block.rank_1, dtype=torch.bool)]
    return used


def step_by_formula(kind: type, settings: dict, parameter: Tensor, gradient: Tensor, is_used: Tensor, state: dict) -> None:
    """Take a step in place. Parameters and state of slices that the batch doesn't use stay unchanged."""
    lr, eps, (b1, b2) = settings["lr"], settings.get("eps"), settings.get("betas", (0.9, 0.999))
    state["step"] = state.get("step", 0) + 1
    lr /= 1 + (state["step"] - 1) * settings.get("lr_decay", 0)
    decay = settings.get("weight_decay", 0) * parameter
    g = gradient if kind is ADAMW else gradient + decay
    initial = torch.full_like(parameter, settings.get("initial_accumulator_value", 0.0))
    if kind is SGD:
        change = lr * g
    elif kind in (ADAM, ADAMW):
        for name, beta, value in (("exp_avg", b1, g), ("exp_avg_sq", b2, g * g)):
            before = state.setdefault(name, initial)
            state[name] = torch.where(is_used, beta * before + (1 - beta) * value, before)
        first, second = state["exp_avg"] / (1 - b1 ** state["step"]), state["exp_avg_sq"] / (1 - b2 ** state["step"])
        change = lr * first / (second.sqrt() + eps) + (lr * decay if kind is ADAMW else 0)
    else:
        slice_dims = [0, 2, 3] if parameter.dim() == 4 else [1]  # diagonals are (r, 1)
        square = (g * g).mean(slice_dims, keepdim=True).expand(g.shape) if kind is RowWiseAdagrad else g * g
        state["sum"] = torch.where(is_used, state.get("sum", initial) + square, state.get("sum", initial))
        change = lr * g / (state["sum"].sqrt() + eps)
    parameter.sub_(torch.where(is_used, change, torch.zeros_like(change)))


def apply(kind: type, parameters: Iterable[Tensor], settings: dict[str, Any]) -> None:
    _apply_optimizer_in_backward(kind, parameters, settings)  # type: ignore[arg-type]


def optimizer_of(parameter: Tensor) -> torch.optim.Optimizer:
    (optimizer,) = parameter._in_backward_optimizers  # type: ignore[attr-defined]
    return optimizer


def chosen(tables: nn.ModuleList, which: str = "all") -> list[nn.Parameter]:
    """All parameters, or only the cores."""
    return [parameter for parameter in tables.parameters() if which == "all" or parameter.dim() == 4]


def as_stored(state: Tensor, actual: Tensor) -> Tensor:
    """Convert state to its stored form: row-wise sums have one number per slice."""
    return state[0, :, 0, 0] if actual.dim() == 1 and state.dim() == 4 else state


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Compare relative to the largest value."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * largest)


@every_case
@every_order
@pytest.mark.parametrize(("which", "mode", "dtype"), [*WAYS, (*ALL_SUM, torch.bfloat16), (*ALL_SUM, torch.float16)])
def test_updates_follow_the_formulas(order: int, kind: type, settings: dict, which: str, mode: str, dtype: torch.dtype) -> None:
    """With 16 bits, a step is computed in float32 and rounded once, also for slices of several blocks of numbers."""
    if dtype == torch.float16 and issubclass(kind, torch.optim.Adam):
        pytest.skip("squares of gradients are zero in float16: refused")
    is_narrow, eps = dtype != torch.float32, torch.finfo(dtype).eps
    tables = make_tables(order, dtype, [TTShape((5, 4), (15, 3), (21,))] if is_narrow and order == 2 else None)
    updated = chosen(tables, which)
    apply(kind, updated, settings)
    expected = copy.deepcopy(tables).double().requires_grad_()
    states: list[dict[str, Any]] = [{} for _ in tables.parameters()]
    for step, batch in enumerate(make_batches(tables, 1, lookups=9, dtype=dtype) if is_narrow else make_batches(tables)):
        rates = [settings["lr"] * (1 + k / 20) / (1 + step) for k in range(len(states))]  # of each parameter, like a schedule
        for parameter, rate in zip(tables.parameters(), rates, strict=True):
            if any(parameter is other for other in updated):
                optimizer_of(parameter).param_groups[0]["lr"] = rate
        before = [parameter.detach().clone() for parameter in tables.parameters()]
        batch.weights.requires_grad_(mode == "sum")
        backward(tables, batch, mode=mode)
        gradients = differentiate(expected, batch, mode)
        if mode == "sum":
            assert_near(batch.weights.grad, gradients.pop().double(), eps if is_narrow else 1e-4)
        used = masks(tables, batch)
        cases = zip(tables.parameters(), expected.parameters(), gradients, used, states, before, rates, strict=True)
        for parameter, exact, gradient, is_used, state, value, rate in cases:
            if not any(parameter is other for other in updated):
                assert torch.equal(parameter, value)
                assert_near(parameter.grad, gradient)
                parameter.grad = None
                continue
            assert parameter.grad is None
            assert torch.equal(parameter[~is_used], value[~is_used])
            assert not torch.equal(parameter, value) or not gradient.any()
            step_by_formula(kind, {**settings, "lr": rate}, exact.data, gradient, is_used, state)
            actual = dict(optimizer_of(parameter).state[parameter])
            assert int(actual.pop("step", step + 1)) == state["step"] == step + 1
            assert actual.keys() == state.keys() - {"step"}
            stored = [(tensor, as_stored(state[name], tensor), 2 * eps) for name, tensor in actual.items()]
            for tensor, exactly, rounding in ((parameter.detach(), exact.detach(), eps), *stored):
                if is_narrow:
                    torch.testing.assert_close(tensor.double(), exactly, rtol=rounding, atol=1e-6)
                else:
                    assert_near(tensor, exactly)


@pytest.mark.parametrize("case", ["SGD", "Adagrad, weight decay", "Adam, weight decay", "row-wise Adagrad, all settings"])
@every_order
def test_updates_do_not_depend_on_the_number_of_threads(order: int, case: str, on_threads: Callable) -> None:
    kind, settings = CASES[case]
    shapes = [TTShape((30, 20, 10, 9)[:order], (4, 4, 2, 2)[:order], (8, 8, 3)[: order - 1])]
    tables = make_tables(order, shapes=[*shapes, *shapes])
    batches = make_batches(tables, 2, lookups=6000)

    def train() -> list[Tensor]:
        trained = copy.deepcopy(tables)
        apply(kind, chosen(trained), settings)
        for batch in batches:
            backward(trained, batch)
        states = [optimizer_of(parameter).state[parameter] for parameter in chosen(trained)]
        return [*trained.parameters(), *(value for state in states for value in state.values())]

    one, two = (on_threads(count, train) for count in (1, 2))
    assert all(map(torch.equal, one, two))


OTHERS = {
    "momentum": (SGD, {"lr": 0.01, "momentum": 0.9}),
    "maximize SGD": (SGD, {"lr": 0.01, "maximize": True}),
    "maximize Adagrad": (ADAGRAD, {"lr": 0.01, "maximize": True}),
    "maximize Adam": (ADAM, {"lr": 0.01, "maximize": True}),
    "amsgrad": (ADAM, {"lr": 0.01, "amsgrad": True}),
    "amsgrad AdamW": (ADAMW, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


def test_row_wise_sums_of_bfloat16_cores_are_float32_after_loading_too() -> None:
    # torch converts states to the dtype of their parameter.
    tables = make_tables(2, torch.bfloat16)
    batches = make_batches(tables, 2, dtype=torch.bfloat16)
    cores = chosen(tables, "cores")
    apply(RowWiseAdagrad, cores, {"lr": 0.1})
    backward(tables, batches[0])
    for core in cores:
        optimizer_of(core).load_state_dict(optimizer_of(core).state_dict())
    before = [optimizer_of(core).state[core]["sum"].float() for core in cores]
    backward(tables, batches[1])
    after = [optimizer_of(core).state[core]["sum"] for core in cores]
    assert {sums.dtype for sums in after} == {torch.float32}
    assert (torch.cat(after) >= torch.cat(before)).all()
    assert sum(map(torch.sum, after)) > sum(map(torch.sum, before))


@pytest.mark.parametrize(
    ("dtype", "kind", "settings"),
    [
        *product((torch.bfloat16, torch.float16), (SGD, ADAGRAD, RowWiseAdagrad), ({}, {"weight_decay": 0.1})),
        *product((torch.bfloat16,), (ADAM, ADAMW), ({}, {"weight_decay": 0.1})),
        (torch.float16, SGD, {"lr": 1e-6}),  # of subnormal numbers
    ],
)
@pytest.mark.parametrize("size", [(2, 500, 3, 20), (60_000, 1)])
def test_steps_of_gradients_of_16_bits_are_exact_in_the_mean(
    dtype: torch.dtype, kind: type, settings: dict[str, Any], size: tuple[int, ...]
) -> None:
    """Small steps aren't lost, zeros among the gradients are no faults, and replicas are rounded alike."""
    gradient = torch.full(size, 2.0**-7)
    gradient.view(-1)[::7] = 0
    if len(size) == 4:
        gradient[:, 0] = 0
    moved = []
    for each in (torch.float32, dtype, dtype):
        parameter = nn.Parameter(torch.full(size, 2e-5 if "lr" in settings else 0.9, dtype=dtype).to(each))
        optimizer = kind([parameter], **{"lr": 1e-4 if kind is not SGD else 1e-2} | settings)
        init_state_(optimizer, parameter)
        before, data = parameter.detach().float().clone(), parameter.data_ptr()
        for _ in range(3):
            parameter.grad = gradient.to(each)
            step_(optimizer, parameter)
        assert parameter.data_ptr() == data
        states = {value.dtype for value in optimizer.state[parameter].values() if value.shape == size}
        assert states <= {each}
        moved.append(parameter.detach().float() - before)
    exact, rounded, again = moved
    assert torch.equal(rounded, again)
    assert 0 < exact.abs().max() < 5e-3
    spread = (2**-24 if "lr" in settings else torch.finfo(dtype).eps) / rounded.numel() ** 0.5
    torch.testing.assert_close(rounded.mean(), exact.mean(), rtol=0.02, atol=4 * spread)
    assert len(size) < 4 or not rounded[:, 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_at_random_keeps_what_needs_none(dtype: torch.dtype) -> None:
    """Also the smallest numbers, and those that aren't finite."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).repeat(16)
    numbers = bits.view(dtype).float()
    rounded = _rounded_at_random(numbers, dtype, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded.float(), numbers, rtol=0, atol=0, equal_nan=True)
    largest = torch.full((64,), 2**31 - 1, dtype=torch.int32).view(torch.float32)  # NaN, by its bits
    assert _rounded_at_random(largest, dtype, torch.Generator()).isnan().all()


def test_stuck_numbers_move_where_gradients_repeat() -> None:
    """Random numbers are others in every step."""
    parameter = nn.Parameter(torch.ones(64, 1, dtype=torch.bfloat16))
    optimizer = ADAMW([parameter], lr=1e-3, weight_decay=0.1)
    for _ in range(400):
        parameter.grad = torch.zeros_like(parameter)
        step_(optimizer, parameter)
    assert float(parameter.detach().mean()) == pytest.approx((1 - 1e-4) ** 400, abs=0.01)


def test_steps_of_row_wise_adagrad_follow_its_formula() -> None:
    settings = {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.3, "initial_accumulator_value": 0.75, **EPS}
    parameter = nn.Parameter(torch.randn(2, 5, 3, 4))
    optimizer = RowWiseAdagrad([parameter], **settings)
    init_state_(optimizer, parameter)
    expected, sums = parameter.detach().double().clone(), torch.full((5,), 0.75, dtype=torch.float64)
    for step in range(3):
        parameter.grad = torch.randn(2, 5, 3, 4)
        parameter.grad[:, step] = 0  # a slice that no id uses
        for k in {*range(5)} - {step}:
            gradient = parameter.grad[:, k].double() + 0.3 * expected[:, k]
            sums[k] += gradient.square().mean()
            expected[:, k] -= 0.1 / (1 + 0.5 * step) * gradient / (sums[k].sqrt() + EPS["eps"])
        step_(optimizer, parameter)
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)


def train_by_step(kind: type, settings: dict[str, Any], tables: nn.ModuleList, batches: list[Batch]) -> nn.ModuleList:
    """Train with an optimizer that steps after backward."""
    trained = copy.deepcopy(tables)
    optimizer = kind(trained.parameters(), **settings)
    for batch in batches:
        optimizer.zero_grad()
        backward(trained, batch)
        optimizer.step()
    return trained


@pytest.mark.parametrize(("kind", "settings"), OTHERS.values(), ids=OTHERS.keys())
def test_other_optimizers_step_by_torchs_hook(kind: type, settings: dict[str, Any]) -> None:
    tables = make_tables(3)
    batches = make_batches(tables)
    expected = train_by_step(kind, settings, tables, batches)
    apply(kind, tables.parameters(), settings)
    for batch in batches:
        backward(tables, batch)
    assert all(map(torch.equal, tables.parameters(), expected.parameters()))


@pytest.mark.parametrize("which", ["two kinds", "some cores", "two of one core", "gradients are requested"])
def test_optimizers_that_differ_step_by_torchs_hook(which: str) -> None:
    """Gradients are requested to average them over processes first, for example."""
    tables = make_tables(2)
    (batch,) = make_batches(tables, 1)
    expected = train_by_step(SGD, {"lr": 0.1}, tables, [batch])
    cores = [core for table in tables for core in table.cores()]
    apply(SGD, tables.parameters() if which != "some cores" else cores[:3], {"lr": 0.1})
    untouched = cores[3:] if which == "some cores" else []
    values = [core.detach().clone() for core in untouched]
    if which == "two kinds":
        del cores[3]._in_backward_optimizers
        for handle in param_to_optim_hook_handle_map.pop(cores[3]):
            handle.remove()
        apply(ADAM, cores[3:], {"lr": 0.1})
    elif which == "two of one core":
        apply(SGD, cores[3:], {"lr": 0.0})
    backward(tables, batch, update_in_backward=which != "gradients are requested")
    for core, exact in zip(cores[:3], [core for table in expected for core in table.cores()], strict=False):
        assert torch.equal(core, exact)
    assert all(core.grad is not None and torch.equal(core, value) for core, value in zip(untouched, values, strict=True))
    assert which != "two kinds" or int(optimizer_of(cores[3]).state[cores[3]]["step"]) == 1


def test_row_wise_adagrad_of_some_cores_is_refused() -> None:
    tables = make_tables(3)
    (batch,) = make_batches(tables, 1)
    apply(RowWiseAdagrad, tables[0].cores(), {"lr": 0.1})
    refuse("RowWiseAdagrad in backward must be given to all cores of the tables that are looked up toge", look_up, tables, batch)


def test_tensors_in_place_of_parameters_have_gradients() -> None:
    table, bags = make_tables(3)[0], (torch.tensor([3, 7, 3, 50]), torch.tensor([0, 1]))
    values = {name: parameter.detach().clone().requires_grad_() for name, parameter in table.named_parameters()}
    expected = torch.autograd.grad(table(*bags).square().sum(), list(table.parameters()))
    apply(SGD, table.parameters(), {"lr": 0.1})
    actual = torch.autograd.grad(torch.func.functional_call(table, values, bags).square().sum(), list(values.values()))
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, table.parameters(), values.values()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_is_updated_without_a_backward(context: Callable) -> None:
    tables = make_tables(3)
    (batch,) = make_batches(tables, 1)
    expected, values = look_up(tables, batch), [parameter.detach().clone() for parameter in tables.parameters()]
    apply(ADAGRAD, tables.parameters(), {"lr": 0.1})
    with context():
        out = look_up(tables, batch)
    assert torch.equal(out, expected)
    assert out.requires_grad == (context is torch.enable_grad)
    assert all(map(torch.equal, tables.parameters(), values))
    assert all(int(optimizer_of(parameter).state[parameter]["step"]) == 0 for parameter in tables.parameters())
