"""Bags of rows in Triton agree with their definition: in Triton's interpreter on CPU, and on a GPU if there is one."""

import copy
import itertools
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from bag_tables import assert_near, differentiate, plan_of, pool, tables_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comera_rec.ops import plan_lookup, tt_bags
from comera_rec.ops.bags import TableGroup, kernel_calls
from comera_rec.ops.bags.updates import register_update
from comera_rec.ops.plan import pairs as pairs_module
from comera_rec.ops.plan.pairs import plan_hot_rows, plan_pairs_of_bags
from comera_rec.tt import TTShape, row_digits

kernels = pytest.importorskip("comera_rec.ops.bags.triton", reason="triton is not installed")
updates = pytest.importorskip("comera_rec.ops.bags.triton_updates")
interpreter = pytest.importorskip("triton.runtime.interpreter")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHUNK = kernels.CHUNK
GROUP = 3 * CHUNK
HOT_ROWS = ((4, 3), (2, 2))
LENGTHS = {
    "jagged": [3, 0, 4, 1, 2, 0, 5, 1],
    "empty": [0] * 8,
    "one id each": [1] * 8,
    "one long bag": [0, 37, 0, 0, 0, 0, 0, 0],
}
SHAPES = {
    1: [TTShape((20,), (6,), ())] * 2,
    2: [TTShape((7, 6), (2, 3), (5,)), TTShape((3, 8), (2, 3), (9,))],
    3: [TTShape((3, 2, 4), (2, 1, 3), (3, 5)), TTShape((2, 3, 6), (2, 1, 3), (4, 1))],
    4: [TTShape((2, 3, 2, 3), (1, 2, 1, 3), (2, 5, 3)), TTShape((2, 2, 3, 3), (1, 2, 1, 3), (1, 2, 2))],
}
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.3}),
    "SGD, a rate in a tensor": (torch.optim.SGD, {"lr": torch.tensor(0.05)}),  # which the host can read in the interpreter only
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
}
NARROW = {  # copies of cores with padded ranks are laid out slice after slice by chance
    3: [TTShape((3, 2, 4), (2, 1, 3), (2, 3)), TTShape((3, 1, 4), (2, 1, 3), (2, 2))],
    4: [TTShape((3, 2, 4, 2), (2, 1, 3, 1), (2, 3, 1)), TTShape((3, 1, 1, 2), (2, 1, 3, 1), (2, 2, 1))],
}


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("test_triton_interpreter.py runs it in a process of its own")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return request.param


def make_tables(order: int = 2, *, shapes: list[TTShape] | None = None, hot: tuple[tuple[int, int], ...] = ()) -> nn.ModuleList:
    return tables_of(shapes or SHAPES[order], hot_rows=[hot])


def look_up(tables: Any, ids: list[Tensor], offsets: Tensor, impl: str, **how: Any) -> Tensor:
    device = tables[0].core_0.device
    plan = plan_of(tables, [each.to(device) for each in ids], impl)
    return pool(tables, [], offsets.to(device), plan=plan, features=len(tables), impl=impl, **how)


def check(
    tables: nn.ModuleList, ids: list[Tensor], offsets: Tensor, device: str, *, weighted: bool = False,
    tolerance: float | None = None, **how: Any,
) -> None:  # fmt: skip
    how["per_sample_weights"] = torch.rand(sum(map(len, ids))) + 0.5 if weighted else None
    expected = differentiate(look_up, tables, ids, offsets, "reference", dtype=torch.float64, **how)
    actual = differentiate(look_up, copy.deepcopy(tables).to(device), ids, offsets, "triton", **how)
    assert_near(actual, expected, tolerance=tolerance)


def draw(tables: nn.ModuleList, lengths: list[int], spare: int = 0) -> tuple[list[Tensor], Tensor]:
    """Draw offsets, and ids of all tables for bags of these lengths plus `spare` ids in no bag."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cuts = [bounds[len(lengths) * t // len(tables)] for t in range(len(tables))] + [bounds[-1] + spare]
    ids = [torch.randint(table.num_embeddings, (end - first,)) for table, first, end in zip(tables, cuts, cuts[1:], strict=False)]
    return ids, torch.tensor(bounds)


@pytest.mark.parametrize(
    ("lengths", "how"),
    [
        *((lengths, {"weighted": True, "num_cols": 5}) for lengths in LENGTHS),
        ("jagged", {"mode": "mean", "num_cols": 5}),
        ("jagged", {"hot": HOT_ROWS, "weighted": True}),
        ("jagged", {"hot": HOT_ROWS, "mode": "mean", "order": 3}),
        ("jagged", {"hot": HOT_ROWS, "mode": "max"}),
        *(("jagged", {"order": order, "weighted": True}) for order in SHAPES),
    ],
    ids=str,
)
def test_bags_and_gradients_match_the_definition(lengths: str, how: dict[str, Any], device: str) -> None:
    tables = make_tables(how.get("order", 2), hot=how.get("hot", ()))
    ids, offsets = draw(tables, LENGTHS[lengths], 3)
    if "hot" in how:
        ids[0] = ids[0] % 8
    check(tables, ids, offsets, device, **{name: value for name, value in how.items() if name not in ("order", "hot")})


@pytest.mark.parametrize(
    ("cols", "ranks"),
    [
        ((8, 8), (16, 7)), ((1, 5), (3, 1)), ((4, 6), (13, 8)), ((2, 8), (70, 5)), ((1, 130), (3, 3)), ((33, 2), (3, 1)),
        ((7, 1), (1, 1)),
    ],
)  # fmt: skip
def test_rows_and_sums_of_any_size(cols: tuple[int, int], ranks: tuple[int, int], device: str) -> None:
    # Up to more tiles than a program's lanes, of rows as of sums.
    tables = make_tables(shapes=[TTShape((3, 2), cols, rank) for rank in ranks])
    check(tables, *draw(tables, [3, 0, 1, 2]), device, weighted=True)


@pytest.mark.parametrize("trailing", [1, 7])
def test_hot_rows_are_found_in_shards_too(trailing: int, device: str) -> None:
    blocks, first_rows = [[3, 4], [], [2, 1, 5]], [0, 0, 4]  # the last table's first block is on another shard
    ids = torch.cartesian_prod(torch.arange(3), torch.arange(12))
    pairs = torch.stack([ids[:, 1] // trailing, ids[:, 1] % trailing, ids[:, 0]]).to(device)
    plan = plan_hot_rows(pairs, [trailing] * 3, first_rows, blocks)
    block_of, key_of = itertools.count(), itertools.count()
    by_table = [
        [(row, 0, block, next(key_of), 16 + block) for count in table for block in [next(block_of)] for row in range(count)]
        for table in blocks
    ]
    left_out = [(-1, -1, 0, 15, 16 + 5)] * 12
    by_table = [[*rows[first:], *left_out][:12] for rows, first in zip(by_table, first_rows, strict=True)]
    right = torch.tensor(by_table).flatten(0, 1).T
    assert plan.counts == (15, 5)
    assert torch.equal(plan.pairs.cpu().long(), right[:3])
    for side in (0, 1):
        keys, order = right[3 + side].sort(stable=True)
        assert torch.equal(plan.slices[side].cpu().long(), keys)
        assert torch.equal(plan.order[side].cpu() - side * len(ids), order)


@pytest.mark.parametrize(
    "lengths",
    [
        [CHUNK, CHUNK - 1, 1],
        [1, 10 * CHUNK, 1],
        [CHUNK + 1] * 2,
        [3 * GROUP],
        [GROUP, GROUP - 1, GROUP + 1],
        [GROUP - CHUNK, 2 * CHUNK],
    ],
    ids=str,
)  # segments that end at or near the end of a chunk or a group, and more chunks and groups than are summed at once
def test_segments_of_any_length(lengths: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "GROUP", GROUP // CHUNK)
    monkeypatch.setattr(updates, "PARTS_AT_ONCE", (2, 2))
    tables = make_tables(shapes=[TTShape((len(lengths), 1), (1, 2), (2,))])
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    check(tables, [ids[torch.randperm(len(ids))]], torch.arange(0, len(ids) + 1, 2), device)


def test_cores_of_16_bits_are_multiplied_and_summed_in_float32(device: str) -> None:
    tables = make_tables(shapes=[TTShape((1, 1), (1, 1), (1,))])
    for parameter in tables.parameters():
        nn.init.ones_(parameter)
    tables = tables.to(device, torch.bfloat16)
    out = look_up(tables, [torch.zeros(300, dtype=torch.int64)], torch.arange(0, 301, 2), "triton")
    out.sum().backward()
    assert tables[0].core_0.grad.item() == 300, "in bfloat16, 1 + 1 + ... stops growing at 256"
    assert tables[0].core_0.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("cols", [(8, 8), (2, 32)], ids=str)
def test_16_bit_cores_at_any_address(cols: tuple[int, int], device: str) -> None:
    # The interpreter checks what kernels claim of addresses; a GPU would stop, or read what is elsewhere.
    tables = make_tables(shapes=[TTShape((2, 3), cols, (8,))], hot=((4, 8),) if cols == (8, 8) else ()).to(device, torch.bfloat16)
    lookup = draw(tables, [2, 0, 1])
    expected = differentiate(look_up, tables, *lookup, "triton")
    for parameter in tables.parameters():
        memory = torch.empty(4 + parameter.numel(), dtype=parameter.dtype, device=device)  # 8 bytes more
        parameter.data = memory.as_strided(parameter.shape, parameter.stride(), 4).copy_(parameter.data)
    torch.testing.assert_close(differentiate(look_up, tables, *lookup, "triton"), expected)


def test_gradients_are_reproducible_draw_no_random_numbers_and_have_their_cores_layout(device: str) -> None:
    tables = make_tables().to(device)
    ids, offsets = draw(tables, [3, 0, 2, 1])
    before = torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    first, second = (differentiate(look_up, tables, ids, offsets, "triton") for _ in range(2))
    after = torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, after)
    assert all(map(torch.equal, first, second))
    for gradient, core in zip(first[1:], tables.parameters(), strict=True):
        assert gradient.stride() == core.stride(), "so that autograd need not copy it"


@pytest.mark.parametrize("rule", [*RULES, "RowWiseAdagrad"])
def test_updates_in_backward_are_those_of_the_cpu(rule: str, device: str) -> None:
    kind, settings = RULES.get(rule) or (pytest.importorskip("torchrec.optim").RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2})
    on_cpu, tables = (make_tables(hot=HOT_ROWS), make_tables(hot=HOT_ROWS))
    tables.load_state_dict(on_cpu.state_dict())
    tables.to(device)
    optimizers = []
    for each in (on_cpu, tables):
        on_device = {name: value.to(each[0].core_0.device) if name == "lr" and isinstance(value, Tensor) else value
                     for name, value in settings.items()}  # fmt: skip
        optimizers.append(kind(each.parameters(), **on_device))
        assert all(register_update(parameter, optimizers[-1]) for parameter in each.parameters())
    for seed in range(2):
        torch.manual_seed(seed)
        ids, offsets = draw(on_cpu, LENGTHS["jagged"])
        for each, impl in ((on_cpu, "cpu"), (tables, "triton")):
            out = look_up(each, ids, offsets, impl)
            out.backward(torch.arange(out.numel()).view(out.shape).sin().to(out))
    for actual, right in zip(tables.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(actual.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-5)
        assert actual.grad is None, "it was updated instead"
    for actual, right in zip(*(optimizers[n].state_dict()["state"].values() for n in (1, 0)), strict=True):
        assert actual.keys() == right.keys()
        for name, state in right.items():
            torch.testing.assert_close(actual[name].cpu(), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_of_16_bits_add_up(dtype: torch.dtype, device: str) -> None:
    value = 1.0 if dtype == torch.bfloat16 else 8.0
    twins = [make_tables(shapes=[TTShape((2, 2), (16, 16), (8,))]).to(dtype=each) for each in (dtype, torch.float32)]
    optimizers, row = [], ([torch.zeros(1, dtype=torch.long)], torch.tensor([0, 1]))
    for tables, impl in zip((twins[0].to(device), twins[1]), ("triton", "cpu"), strict=True):
        for parameter in tables.parameters():
            nn.init.constant_(parameter, value)
        optimizers.append(torch.optim.Adagrad(tables.parameters(), lr=2**-6, initial_accumulator_value=64.0))
        for parameter in tables.parameters():
            register_update(parameter, optimizers[-1])
        for _ in range(8):
            (look_up(tables, *row, impl).float().sum() / (16 * value**2)).backward()
    for narrow, exact in zip(*(list(tables.parameters()) for tables in twins), strict=True):
        mean, true = (core.detach()[:, 0].float().mean().item() for core in (narrow, exact))  # of a diagonal: all eight numbers
        assert abs(mean - true) < (1 if exact.dim() == 2 else 0.4) * torch.finfo(dtype).eps * true
        assert value - true > torch.finfo(dtype).eps * value, "far enough to differ from unchanged cores"
    sums = [
        optimizer.state[tables[0].core_0]["sum"][:, 0].float().mean().item()
        for tables, optimizer in zip(twins, optimizers, strict=True)
    ]
    assert sums[1] > 64.05
    assert abs(sums[0] - sums[1]) < 0.1 * (sums[1] - 64)


def test_adam_gets_gradients_because_its_moments_decay_everywhere(device: str) -> None:
    tables = make_tables().to(device)
    optimizer = torch.optim.Adam(tables.parameters())
    for parameter in tables.parameters():
        register_update(parameter, optimizer)
    look_up(tables, *draw(tables, [2, 1]), "triton").sum().backward()
    assert all(parameter.grad is not None for parameter in tables.parameters())


@pytest.mark.parametrize("counts", [(9, 9), (4, 13)], ids=["alike", "jagged"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_plan_has_both_slices_of_every_id_in_order(counts: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    row_shapes = [shape.row_shape for shape in SHAPES[2]]
    ids = [torch.randint(shape.num_rows, (count,), dtype=dtype) for shape, count in zip(SHAPES[2], counts, strict=True)]
    plan = plan_lookup([each.to(device) for each in ids], row_shapes, impl="triton")
    digits = torch.cat([torch.stack(row_digits(each.long(), shape)) for each, shape in zip(ids, row_shapes, strict=True)], 1)
    table = torch.arange(2).repeat_interleave(torch.tensor(counts))
    assert torch.equal(plan.pairs.cpu(), torch.cat([digits, table[None]]).int())
    keys = digits + torch.tensor([[0, 7], [10 + 1, 10 + 1 + 6]])[:, table]
    assert torch.equal(plan.slices.cpu().long(), keys.sort(1).values)
    assert torch.equal(keys.flatten()[plan.order.cpu()], plan.slices.cpu().long())
    assert plan.counts == (10, 14)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spare", [0, 5])
def test_a_plan_from_the_starts_of_bags_is_that_of_each_tables_ids(dtype: torch.dtype, spare: int, device: str) -> None:
    lengths = torch.tensor([[2, 0, 1], [0, 0, 0], [0, 3, 4]])  # the first table has the first two features of three bags
    offsets = F.pad(lengths.flatten().cumsum(0), (1, 0)).to(dtype)
    row_shapes, rows = [shape.row_shape for shape in SHAPES[2]], [shape.num_rows for shape in SHAPES[2]]
    ids = [torch.randint(count, (length,), dtype=dtype) for count, length in zip(rows, (3, 7), strict=True)]
    joined = torch.cat([*ids, torch.full((spare,), -9, dtype=dtype)]).to(device)
    expected = plan_lookup([each.to(device) for each in ids], row_shapes, rows, impl="triton")
    plan = plan_pairs_of_bags(joined, offsets.to(device), 3, [2, 1], row_shapes, rows)
    assert plan.counts == expected.counts
    assert torch.equal(plan.pairs[:, :10], expected.pairs)
    assert (plan.pairs[:2, 10:] == -1).all()
    used = plan.slices != torch.tensor([[plan.counts[0]], [sum(plan.counts) + 1]], device=device)
    assert used.sum(1).tolist() == [10, 10]
    assert torch.equal(plan.slices[used], expected.slices.flatten())
    assert torch.equal(plan.order[used], (expected.order + torch.tensor([[0], [spare]], device=device)).flatten())


def test_ids_in_no_bag_change_nothing(device: str) -> None:
    results, made = [], make_tables()
    for spare in (0, 4):
        tables = copy.deepcopy(made).to(device)
        ids, offsets = torch.tensor([3, 9, 3, 1]), torch.tensor([0, 1, 3, 3, 4])
        ids = torch.cat([ids, torch.full((spare,), 1 << 40)]).to(device)
        rows = [table.num_embeddings for table in tables]
        shapes = [table.shape.row_shape for table in tables]
        plan = plan_pairs_of_bags(ids, offsets.to(device), 2, [1, 1], shapes, rows)
        weights = torch.linspace(1, 2, 8)[: 4 + spare].to(device).requires_grad_()
        out = pool(tables, [], offsets.to(device), plan=plan, features=2, impl="triton", per_sample_weights=weights)
        out.sin().sum().backward()
        assert not weights.grad[4:].any()
        results.append([out, weights.grad[:4], *(parameter.grad for parameter in tables.parameters())])
    torch.testing.assert_close(*results)


def test_the_device_finds_ids_out_of_range_and_offsets_that_do_not_ascend(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("the assertion would end the process's work on the GPU")
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))  # keeps assertions
    monkeypatch.setattr("comera_rec.ops.bags._require_ascending", lambda *_: None)  # as on a GPU
    for bad, counts in itertools.product((-1, 41), ((3, 3), (3, 4))):
        ids = [torch.zeros(count, dtype=torch.int64) for count in counts]
        ids[0][1] = bad
        with pytest.raises(interpreter.InterpreterError, match="an id is out of range for its table"):
            plan_lookup(ids, [shape.row_shape for shape in SHAPES[2]], [41, 24], impl="triton")
    ids = [torch.zeros(count, dtype=torch.int64) for count in (2, 1)]
    for offsets in ([1, 3, 3], [0, 2, 1], [0, 2, 4]):
        with pytest.raises(interpreter.InterpreterError, match="offsets don't ascend from 0 to at most the number of ids"):
            look_up(make_tables(), ids, torch.tensor(offsets), "triton")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
def test_an_infinite_slice_changes_no_bag_that_does_not_use_it(device: str) -> None:
    # Slice 0 is the one whose address idle lanes have.
    tables = make_tables().to(device)
    with torch.no_grad():
        for core in tables[0].cores():
            core[:, 0] = torch.inf
    ids, offsets = [torch.full((4,), 41), torch.tensor([1, 2])], torch.tensor([0, 3, 4, 5, 6])
    assert look_up(tables, ids, offsets, "triton").isfinite().all()


def test_tables_are_rounded_independently(device: str) -> None:
    first = make_tables(shapes=[TTShape((2, 2), (4, 4), (8,))])[0]
    tables = nn.ModuleList([first, copy.deepcopy(first)]).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(tables.parameters(), lr=1e-3)
    assert all(register_update(parameter, optimizer) for parameter in tables.parameters())
    ids = [torch.tensor([0, 1])] * 2
    for _ in range(3):
        look_up(tables, ids, torch.arange(5), "triton").sum().backward()
    for one, other in zip(*(table.parameters() for table in tables), strict=True):
        assert not torch.equal(one, other)


def test_what_is_kept_follows_states_that_move(device: str) -> None:
    """A group of tables is looked up again after its optimizer's states have been replaced."""
    results = []
    for is_kept in (True, False):
        torch.manual_seed(0)
        tables = make_tables(hot=HOT_ROWS).to(device)
        ids, offsets = draw(tables, LENGTHS["jagged"])
        optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
        assert all(register_update(parameter, optimizer) for parameter in tables.parameters())
        parts = [table.forward_parameters() for table in tables]
        group = TableGroup(parts)
        for _ in range(3):
            plan = plan_of(tables, [each.to(device) for each in ids], "triton")
            looked_up = tt_bags(group if is_kept else parts, plan, offsets.to(device), num_cols=6, features=2, impl="triton")
            looked_up.square().sum().backward()
            for state in reversed(optimizer.state.values()):
                state["sum"] = state["sum"] + 1
        results.append(list(tables.parameters()))
    torch.testing.assert_close(*results)


def test_ids_are_joined_in_their_order(device: str) -> None:
    tables = make_tables(shapes=[SHAPES[2][0]] * 2)
    first, second = torch.randint(tables[0].num_embeddings, (20,)).to(device).chunk(2)
    for ids in ([second, first], [first, first], [first[::2], second[:5]], [first, second]):
        check(tables, ids, torch.arange(1 + sum(map(len, ids))), device)


def test_a_strided_diagonal_is_read_where_its_numbers_are(device: str) -> None:
    tables = make_tables(shapes=[TTShape((4, 3), (2, 2), (4,))])
    tables[0].rank_1 = nn.Parameter(torch.arange(1.0, 9.0)[::2, None])
    ids, offsets = draw(tables, [3, 2])
    expected = look_up(copy.deepcopy(tables).double(), ids, offsets, "reference")
    tables = tables.to(device)
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    assert all(register_update(parameter, optimizer) for parameter in tables.parameters())
    out = look_up(tables, ids, offsets, "triton")
    torch.testing.assert_close(out.detach().cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["order 3", "two rates", "decay"])
def test_row_wise_adagrad_that_kernels_cannot_apply_is_refused(case: str, device: str) -> None:
    kind = pytest.importorskip("torchrec.optim").RowWiseAdagrad
    tables = make_tables(3 if case == "order 3" else 2).to(device)
    cores = [parameter for parameter in tables.parameters() if parameter.dim() == 4]
    groups = [{"params": cores[:1], "lr": 0.2 if case == "two rates" else 0.1}, {"params": cores[1:]}]
    optimizer = kind(groups, lr=0.1, lr_decay=0.5 if case == "decay" else 0.0)
    assert all(register_update(core, optimizer) for core in cores)
    with pytest.raises(ValueError, match="tables of order 2" if case == "order 3" else "the same settings for all cores"):
        look_up(tables, *draw(tables, LENGTHS["jagged"]), "triton")


def test_a_plan_for_other_tables_or_devices_is_refused(device: str) -> None:
    tables = make_tables().to(device)
    ids, offsets = draw(tables, [1, 1])
    plan = plan_lookup([each.to(device) for each in ids], [(7, 6), (4, 8)], impl="triton")
    parts = [table.forward_parameters() for table in tables]
    with pytest.raises(ValueError, match=r"the plan is for tables of \(11, 14\) slices, these have \(10, 14\)"):
        tt_bags(parts, plan, offsets.to(device), num_cols=6, features=2, impl="triton")
    for impl, other in (("reference", "triton"), ("triton", "reference"), *((("cpu", "reference"),) if device == "cpu" else ())):
        plan = plan_of(tables, [each.to(device) for each in ids], other)
        with pytest.raises(ValueError, match=rf"'{impl}', but the plan is for '{other}': .*impl='{impl}'\)"):
            tt_bags(parts, plan, offsets.to(device), num_cols=6, features=2, impl=impl)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_constants_stay_when_cores_are_copied(order: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    # New constants can't be captured.
    tables = make_tables(shapes=NARROW.get(order) or [TTShape((3, 2), (2, 3), (rank,)) for rank in (4, 0, 5)])
    for core in (core for table in tables if order == 2 for core in table.cores()):  # ranks of the others are padded
        core.data = core.data.contiguous()  # not slice-major, so that it is copied
    ids, offsets = draw(tables, [1, 2, 0, 1, 0, 2])  # among tables of order 2 is one that has lost all ranks
    check(tables, ids, offsets, device)
    seen: list[list[Any]] = []
    for module in (kernel_calls, pairs_module):
        monkeypatch.setattr(module, "on_device", lambda rows, device: (seen[-1].append(rows), torch.tensor(rows, device=device))[1])
    keep = []
    for _ in range(3):
        seen.append([])
        keep.append(differentiate(look_up, tables.to(device), ids, offsets, "triton"))  # so that the next results go elsewhere
    assert seen[0] == seen[1] == seen[2]


def test_autocast_leaves_lookups_of_order_3_alone(device: str) -> None:
    tables = make_tables(shapes=[TTShape((5, 4, 3), (2, 2, 2), (3, 3))])
    ids, offsets = draw(tables, [1, 2, 0])
    expected = look_up(tables.to(device), ids, offsets, "triton")
    with torch.autocast(device, torch.bfloat16):
        actual = look_up(tables, ids, offsets, "triton")
    gradients = [torch.autograd.grad(out.square().sum(), list(tables.parameters())) for out in (actual, expected)]
    torch.testing.assert_close((actual, *gradients[0]), (expected, *gradients[1]))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_compiled_lookups_equal_eager_ones(order: int, device: str) -> None:
    if device == "cuda":
        pytest.skip("tracing is the same there")
    tables, lookup = make_tables(order, hot=HOT_ROWS[1:]), draw(make_tables(order), LENGTHS["jagged"])
    compiled = torch.compile(look_up, backend="aot_eager", fullgraph=True)
    expected = differentiate(look_up, tables, *lookup, "triton")
    torch.testing.assert_close(differentiate(compiled, tables, *lookup, "triton"), expected)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_kept_group_serves_evaluations_new_values_checkpoints_and_saved_copies(order: int, device: str) -> None:
    tables = make_tables(order, shapes=NARROW.get(order)).to(device)
    ids, offsets = draw(tables, LENGTHS["jagged"])
    group = TableGroup([table.forward_parameters() for table in tables])
    plan = plan_of(tables, [each.to(device) for each in ids], "triton")

    def from_group(*_: Any) -> Tensor:
        return tt_bags(group, plan, offsets.to(device), num_cols=6, features=2, impl="triton")

    for context in (torch.inference_mode(), FlopCounterMode(display=False)):
        with context, torch.no_grad():
            from_group()
    with torch.no_grad():
        for parameter in tables.parameters():
            parameter.mul_(1.5)
    expected = differentiate(look_up, tables, ids, offsets, "reference", dtype=torch.float64)
    assert_near(differentiate(from_group, tables), expected)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda tensor: tensor):
        assert_near(differentiate(from_group, tables), expected)
    checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert_near(differentiate(lambda tables: checkpointed(from_group, tables), tables), expected)


def test_unused_slices_between_used_ones_have_no_owner(device: str) -> None:
    tables = make_tables(shapes=[TTShape((300, 1), (2, 2), (3,))])
    check(tables, [torch.tensor([0, 1, 150, 299])], torch.arange(5), device)


@pytest.mark.gpu
def test_a_slice_of_very_many_ids_on_a_gpu() -> None:
    tables = make_tables(shapes=[TTShape((300, 200), (8, 8), (16,))])
    ids = (60_000 ** torch.rand(200_000)).long() - 1
    check(tables, [ids], torch.arange(200_001), "cuda", tolerance=1e-4)
