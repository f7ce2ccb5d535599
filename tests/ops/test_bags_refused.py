"""Bad arguments of bags, and implementations that can't run, are refused with an error that names them."""

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bag_tables import TOLERANCE, every_impl, make_tables, plan_of, pool, pool_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor

from comera_rec.ops import plan_lookup
from comera_rec.ops.bags import resolve_bags_impl
from comera_rec.tt import slice_major


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2, 1, 3], [0, 4], [-1, 3]])
@every_impl
def test_offsets_that_do_not_ascend_are_refused(impl: str, offsets: list[int], mode: str) -> None:
    tables = make_tables([(5, 4)], (2, 3), (2,))
    with pytest.raises(ValueError, match="offsets must ascend from 0 to at most 3, the number of ids"):
        pool(tables, [torch.tensor([3, 4, 3])], torch.tensor(offsets, dtype=torch.int64), mode=mode, impl=impl)


@every_impl
def test_modes_and_weights_that_do_not_fit_are_refused(impl: str) -> None:
    tables, ids, offsets = make_tables([(5, 4)], (2, 3), (2,)), [torch.tensor([3, 4, 3])], torch.tensor([0, 3])
    refuse("mode", pool, tables, ids, offsets, mode="median", impl=impl)
    few = torch.ones(2)
    refuse("2 per_sample_weights for 3 ids: give one for each", pool, tables, ids, offsets, per_sample_weights=few, impl=impl)
    for mode in ("mean", "max"):
        with pytest.raises(NotImplementedError, match=f"per_sample_weights need mode 'sum', not '{mode}': drop them"):
            pool(tables, ids, offsets, per_sample_weights=torch.ones(3), mode=mode, impl=impl)


# Smaller, larger, with the same number of rows or of slices, and one more table.
@pytest.mark.parametrize(
    "row_shapes", [[(2, 2), (2, 5)], [(5, 99), (2, 5)], [(4, 5), (2, 5)], [(5, 5), (2, 4)], [(5, 4), (2, 5), (2, 5)]]
)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_plan_for_other_tables_is_refused(mode: str, row_shapes: list[tuple[int, ...]]) -> None:
    tables = make_tables([(5, 4), (2, 5)], (2, 3), (2,))
    features = len(row_shapes)
    plan = plan_lookup([torch.tensor([2, 3]) for _ in row_shapes], row_shapes)
    arguments = {"plan": plan, "mode": mode, "features": features}
    refuse("cores.* but the plan is for", pool, tables, [], torch.arange(2 * features + 1), **arguments)


SGD, ADAGRAD, ROW_WISE, ADAM = range(4)
SETTINGS = [0.1, 0, 0, 0, 0, 1, 1] * 8


def put(sequence: list[Tensor], k: int, tensor: Tensor) -> list[Tensor]:
    return [*sequence[:k], tensor, *sequence[k + 1 :]]


def core_of(*sizes: int, k: int = 0) -> Tensor:
    return slice_major(torch.randn(sizes), k, 3)


# What replaces an argument, and the message; a number names the tensor of a list to replace.
REFUSED: list[tuple[str, int | None, Callable[[Any], Any], str]] = [
    ("cores", None, lambda cores: cores[:5], "cores holds 5 tensors, but the plan is for 2 tables of 3 cores"),
    ("cores", 0, lambda core: core_of(2, 3, 2, 2), r"cores\[0\] has shape \(2, 3, 2, 2\): give \(1, m, n, r\)"),
    ("cores", 1, lambda core: core_of(3, 2, 1, 3, k=1), r"cores\[1\] has shape \(3, 2, 1, 3\): give \(2, m, n, r\), with equal"),
    ("cores", 2, lambda core: core_of(3, 4, 3, 2, k=2), r"cores\[2\] has last rank 2: the last core must end in rank 1"),
    ("cores", 1, lambda core: core_of(2, 3, 1, 3, k=1), r"cores\[1\] has shape \(2, 3, 1, 3\), but the plan is for 2 slices"),
    ("cores", 3, lambda core: core_of(1, 2, 4, 4), r"cores\[3\] has 4 columns, but that of table 0 has 2: look up tables with"),
    ("cores", 0, lambda core: core[..., 0], r"cores\[0\] has shape \(1, 3, 2\): give \(1, m, n, r\)"),
    ("cores", 0, lambda core: core.contiguous(), r"cores\[0\] is not a slice-major tensor on CPU: see slice_major"),
    ("cores", 4, lambda core: core.bfloat16(), r"cores\[4\] has another type than cores\[0\]: convert it"),
    ("cores", None, lambda cores: [core.double() for core in cores], "cores holds neither float32 nor bfloat16 nor float16"),
    ("diagonals", None, lambda diagonals: diagonals[:3], "diagonals holds 3 tensors for 2 tables of 3 cores and 1 hot"),
    ("diagonals", 2, lambda _: torch.ones(4, 2), r"diagonals\[2\] has shape \(4, 2\): give a contiguous one of 4"),
    ("diagonals", 2, lambda _: torch.ones(8)[::2], r"diagonals\[2\] has shape \(4\): give a contiguous one of 4"),
    ("diagonals", 4, lambda _: torch.ones(3), r"diagonals\[4\] has shape \(3\): give a contiguous one of 2"),
    ("diagonals", 0, lambda _: torch.ones(2).double(), "diagonals holds neither float32 nor bfloat16 nor float16"),
    ("plan", None, lambda plan: plan[:6], "plan holds 6 tensors: give the 7 of plan_lookup"),
    ("plan", None, lambda plan: [tensor.long() for tensor in plan], "plan is not int32: convert it"),
    ("plan", 3, lambda rows: rows.mT.contiguous().mT, "plan is not a contiguous tensor on CPU: move it, or copy it"),
    ("plan", 1, lambda order: order[:4], "plan has tensors of inconsistent sizes: take all of them from one call"),
    ("plan", 2, lambda starts: starts[:5], "plan has tensors of inconsistent sizes: take all of them from one call"),
    ("plan", 3, lambda rows: rows[:, :4].contiguous(), "plan has tensors of inconsistent sizes"),
    ("plan", 4, lambda left: left[:, :0], "plan has tensors of inconsistent sizes"),
    ("plan", 6, lambda bounds: bounds.flatten(), "plan has tensors of inconsistent sizes"),
    ("plan", 6, lambda bounds: bounds[:2], "plan has tensors of inconsistent sizes"),
    ("offsets", None, lambda offsets: offsets.int(), "offsets is not int64: convert it"),
    ("offsets", None, lambda _: torch.tensor([0, 2, 6]), "offsets must ascend from 0 to at most 5, the number of ids"),
    ("offsets", None, lambda _: torch.tensor([0, 2, 3, 5]), "offsets holds 3 bags, which is not a multiple of 2 features"),
    ("weights", None, lambda _: torch.ones(4), "per_sample_weights holds 4 numbers for 5 ids: give one for each, and mode 'sum'"),
    ("weights", None, lambda _: torch.ones(5).double(), "per_sample_weights is not float32: convert it"),
    ("slots", None, lambda _: [], "offsets holds 2 bags, which is not a multiple of 0 features"),
    ("slots", None, lambda _: [1, 1], "slots are not different numbers from 0 to 1: give each feature its own"),
    ("slots", None, lambda _: [-1, 1], "slots are not different numbers from 0 to 1: give each feature its own"),
    ("num_slots", None, lambda _: 1, "slots are not different numbers from 0 to 0: give each feature its own"),
    ("num_slots", None, lambda _: 2**31, "there are 1 samples of 2147483648 slots: give at most 2147483647 slots together"),
    ("num_cols", None, lambda _: 7, "num_cols is 7, but the cores make 6 columns"),
    ("num_cols", None, lambda _: 0, "num_cols is 0, but the cores make 6 columns"),
    ("num_cols", None, lambda _: 5, r"cores\[7\] has shape \(2, 1, 6, 1\): give \(2, 1, 5, 1\), the projection of a hot block"),
    ("hot_blocks", None, lambda _: [0, 0], "cores holds 8 tensors, but the plan is for 2 tables of 3 cores, with 0 hot blocks"),
    ("hot_blocks", None, lambda _: [1], "hot_blocks and first_rows hold 1 and 2 numbers for 2 tables: give one for each, or"),
    ("hot_blocks", None, lambda _: [0, -1], "table 1 has -1 hot_blocks and first row 0: give numbers from 0 on"),
    ("first_rows", None, lambda _: [0, -2], "table 1 has 1 hot_blocks and first row -2: give numbers from 0 on"),
    ("cores", 6, lambda _: core_of(1, 4, 2, 1), r"cores\[6\] has shape \(1, 4, 2, 1\): give \(1, rows, 1, k\)"),
    ("cores", 6, lambda _: core_of(1, 0, 1, 2), r"cores\[6\] has shape \(1, 0, 1, 2\): give \(1, rows, 1, k\)"),
    ("cores", 7, lambda _: core_of(3, 1, 6, 1, k=2), r"cores\[7\] has shape \(3, 1, 6, 1\): give \(2, 1, 6, 1\)"),
]


@pytest.mark.parametrize(("name", "k", "change", "message"), REFUSED)
def test_the_operators_refuse_bad_arguments(name: str, k: int | None, change: Callable[[Any], Any], message: str) -> None:
    arguments = pool_arguments()
    old = arguments[name]
    arguments[name] = change(old) if k is None else put(old, k, change(old[k]))
    gradient, ops = torch.ones(1, 12), torch.ops.comera_rec
    refuse(message, ops.pool, *arguments.values())
    refuse(message, ops.pool_backward, gradient, *arguments.values())
    refuse(message, ops.pool_backward_update, gradient, *arguments.values(), [], [], SGD, SETTINGS, 0)
    refuse(message, ops.pool_into, gradient, *arguments.values())


@settings(max_examples=300)
@given(data=st.data())
def test_plans_are_refused_or_those_of_some_ids(data: st.DataObject) -> None:
    """Whatever number of a plan changes, no memory beyond its tensors is read or written."""
    draw, order = data.draw, data.draw(st.integers(2, 4))
    rows = [(3, 2, 4, 2)[:order], (2, 2, 2, 2)[:order]]
    tables = make_tables(rows, (2, 1, 3, 1)[:order], (2, 3, 2)[: order - 1], hot_rows=[(), ((4, 2),)])
    ids = [torch.randint(table.num_embeddings, (draw(st.integers(0, 6)),)) for table in tables]
    plan, offsets = plan_of(tables, ids), torch.tensor([0, 2, sum(map(len, ids))]).clamp(max=sum(map(len, ids)))
    changed = draw(st.sampled_from([tensor for tensor in plan if tensor.numel()])).view(-1)
    changed[draw(st.integers(0, len(changed) - 1))] = draw(st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 5, 7, 8, 13, 2**31 - 1]))
    try:
        bags = pool(tables, [], offsets, plan=plan)
    except ValueError:
        return
    torch.testing.assert_close(bags, pool(tables, [], offsets, plan=plan, impl="reference"))
    bags.sum().backward()


def test_gradients_of_other_sizes_and_types_are_refused() -> None:
    arguments, ops = pool_arguments().values(), torch.ops.comera_rec
    for gradient, message in (
        (torch.ones(1, 11), r" has shape \(1, 11\), but the bags are 1 x 12"),
        (torch.ones(0), r" has shape \(0\), but the bags are 1 x 12"),
        (torch.ones(1, 12, dtype=torch.bfloat16), " is not float32: convert it"),
        (torch.ones(1).expand(1, 12), " is not a contiguous tensor on CPU: move it, or copy it"),
    ):
        refuse("gradient" + message, ops.pool_backward, gradient, *arguments)
        refuse("gradient" + message, ops.pool_backward_update, gradient, *arguments, [], [], SGD, SETTINGS, 0)
        refuse("out" + message, ops.pool_into, gradient, *arguments)


def test_slots_that_do_not_fit_are_refused() -> None:
    bags, few, write = torch.ones(2, 12), torch.ones(2, 4), torch.ops.comera_rec.write_slots
    refuse(r"few has shape \(3, 4\) and all \(2, 12\): give bags of as many samples", write, bags, torch.ones(3, 4), [0])
    refuse("slots hold 3, but there are 3", write, bags, few, [3])
    refuse("slots hold -1, but there are 3", write, bags, few, [-1])
    refuse("all is not float32: convert it", write, bags.double(), few, [0])
    refuse(r"all has shape \(2, 12\) and width is 0", torch.ops.comera_rec.read_slots, bags, [0], 0)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        (5, "settings", lambda numbers: numbers, "kind is 5: choose 0 to 4"),
        (-1, "settings", lambda numbers: numbers, "kind is -1: choose 0 to 4"),
        (SGD, "settings", lambda numbers: numbers[:41], "settings holds 41 numbers: give 7 for each core, or for each core and"),
        (SGD, "settings", lambda numbers: numbers[:49], "settings holds 49 numbers: give 7 for each core, or for each core and"),
        (SGD, "first", lambda cores: cores, "first and second hold 8 and 0 states for 8 parameters"),
        (ADAGRAD, "first", lambda cores: cores[:5], "first and second hold 5 and 0 states for 8 parameters"),
        (ADAM, "second", lambda cores: [], "first and second hold 8 and 0 states for 8 parameters"),
        (ADAGRAD, "first", lambda cores: put(cores, 2, core_of(3, 4, 3, 2, k=2)), r"first\[2\] has shape \(3, 4, 3, 2\) or"),
        (ADAGRAD, "first", lambda cores: put(cores, 1, cores[1].contiguous()), r"first\[1\] has shape \(2, 2, 1, 3\) or strides"),
        (ADAGRAD, "first", lambda cores: put(cores, 1, cores[1].double()), r"first\[1\] has shape \(2, 2, 1, 3\) or strides"),
        (ADAM, "second", lambda cores: put(cores, 0, torch.zeros(3)), r"second\[0\] has shape \(3\) or strides unlike those of"),
        (ROW_WISE, "first", lambda cores: cores, r"first\[0\] has shape \(1, 3, 2, 2\): give a float32 number for each of 3"),
    ],
)
def test_states_and_settings_that_do_not_fit_are_refused(kind: int, name: str, change: Callable[[Any], Any], message: str) -> None:
    arguments = pool_arguments()
    cores = [core.clone() for core in arguments["cores"]]
    values = {"first": [] if kind <= SGD else cores, "second": cores if kind == ADAM else [], "settings": SETTINGS}
    values[name] = change(cores if name != "settings" else values[name])
    before = copy.deepcopy(arguments["cores"])
    given = torch.ones(1, 12), *arguments.values(), values["first"], values["second"], kind, values["settings"], 0
    refuse(message, torch.ops.comera_rec.pool_backward_update, *given)
    assert all(map(torch.equal, arguments["cores"], before))


def test_what_auto_stands_for_and_implementations_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # whether Triton is installed here or not
    for impl, place, dtype, order, message in (
        ("numpy", "cpu", torch.float32, 2, "impl is 'numpy': choose 'auto' or one of 'reference', 'cpu', 'triton'"),
        ("cpu", "cpu", torch.float64, 2, "impl is 'cpu', which takes two to four cores of .* float16, not torch.float64"),
        ("cpu", "cpu", torch.float32, 1, "impl is 'cpu', which takes two to four cores"),
        ("cpu", "cuda", torch.float32, 2, "impl is 'cpu', but the tensors are on cuda: choose 'auto' or 'triton'"),
        ("triton", "cpu", torch.float32, 2, "impl is 'triton', which needs a GPU, but the tensors are on cpu: move them there or"),
        ("triton", "cuda", torch.float64, 2, "impl is 'triton', which computes in float32: give float64 to 'reference'"),
    ):
        refuse(message, resolve_bags_impl, impl, torch.device(place), dtype, order)
    for device in map(torch.device, ("cpu", "meta")):
        for dtype in TOLERANCE:
            assert resolve_bags_impl("auto", device, dtype, 2) == resolve_bags_impl("cpu", device, dtype, 4) == "cpu"
            assert resolve_bags_impl("auto", device, dtype, 1) == "reference"
        assert resolve_bags_impl("auto", device, torch.float64, 2) == "reference"
    cuda = torch.device("cuda")
    assert resolve_bags_impl("auto", cuda, torch.float32, 2) == resolve_bags_impl("triton", cuda, torch.float32, 3) == "triton"
    assert resolve_bags_impl("auto", cuda, torch.float64, 2) == "reference"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve_bags_impl("auto", cuda, torch.float32, 2) == "reference"
    refuse(r"triton is not installed: install it \(pip install triton\) or", resolve_bags_impl, "triton", cuda, torch.float32, 2)
