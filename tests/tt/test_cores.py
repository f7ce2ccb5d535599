"""Shapes: factors, digits of rows, what ranks and linear layers cost; cores: initialization, contraction, layout in memory."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import comera_rec as cr
from comera_rec.ops import plan_lookup, tt_linear
from comera_rec.tt import TTShape, factorize, is_slice_major, row_digits, slice_major, tt_cost, tt_to_dense
from comera_rec.tt.cost import CALL, LAYER, NUMBER


@given(size=st.one_of(st.tuples(st.integers(1, 10**9), st.integers(1, 4)), st.tuples(st.integers(1, 10_000), st.integers(5, 8))))
@example(size=(10**9, 8))
@example(size=(999_999_937, 2))  # prime
@example(size=(1, 8))
@example(size=(2, 8))
def test_factors_cover_the_size_in_balance_and_waste_little(size: tuple[int, int]) -> None:
    n, order = size
    factors = factorize(n, order)
    assert len(factors) == order
    assert all(isinstance(factor, int) and factor >= 1 for factor in factors)
    assert list(factors) == sorted(factors, reverse=True)
    assert math.prod(factors) >= n
    # No factor could be smaller by one: the padding is less than one slice of the largest core.
    if factors[0] > 1:
        assert (factors[0] - 1) * math.prod(factors[1:]) < n
    # Balanced: at most twice as many slices in total as with d-th roots.
    root = n ** (1 / order)
    assert sum(factors) <= max(2.0 * order * root, order * (math.ceil(root) + 1))


@pytest.mark.parametrize(
    ("n", "order", "expected"),
    [(64, 2, (8, 8)), (128, 2, (16, 8)), (16, 4, (2, 2, 2, 2)), (1_000_000, 3, (100, 100, 100)), (768, 3, (12, 8, 8))],
)
def test_sizes_with_balanced_divisors_are_not_padded(n: int, order: int, expected: tuple[int, ...]) -> None:
    factors = factorize(n, order)
    assert math.prod(factors) == n
    assert sum(factors) <= sum(expected)


@given(rows=st.integers(1, 10**8), dim=st.integers(1, 256), rank=st.integers(1, 64), order=st.integers(2, 4))
def test_tables_fit_their_shape_and_ranks_are_capped(rows: int, dim: int, rank: int, order: int) -> None:
    shape = TTShape.for_table(rows, dim, tt_ranks=rank, order=order)
    assert shape.order == order
    assert shape.num_rows >= rows
    assert shape.num_cols >= dim
    modes = [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
    for k, capped in enumerate(shape.ranks, start=1):
        unfolding = min(math.prod(modes[:k]), math.prod(modes[k:]))  # the bond's unfolding bounds its rank
        assert capped == min(rank, unfolding)


@given(rows=st.integers(100, 10**8), dim=st.sampled_from([1, 7, 16, 64, 128]), saving=st.floats(2, 500), data=st.data())
def test_a_budget_is_never_exceeded_and_nearly_used(rows: int, dim: int, saving: float, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([TTShape.for_table, TTShape.for_linear]))
    budget = max(1, int(rows * dim / saving))
    try:
        shape = kind(rows, dim, budget_params=budget)
    except ValueError as error:
        assert "takes at least" in str(error)  # noqa: PT017  the budget may be out of reach
        for order in (2, 3, 4) if kind == TTShape.for_table else (2, 4, 6, 8):
            assert kind(rows, dim, tt_ranks=1, order=order).num_params > budget
        return
    assert shape.num_params <= budget
    if kind == TTShape.for_table:
        assert shape.num_rows >= rows
        assert shape.num_cols >= dim
        assert shape == kind(rows, dim, budget_params=budget)
    larger = shape.with_ranks(max(shape.ranks) + 1)
    assert larger.num_params > budget or larger == shape, "no larger rank fits"


def test_defaults_and_the_order_that_ranks_or_a_budget_imply() -> None:
    assert TTShape.for_table(1_000_000, 64).order == 2
    assert TTShape.for_table(1_000_000, 64).ranks == (16,)
    assert TTShape.for_table(1_000_000, 64, tt_ranks=(4, 5, 6)).ranks == (4, 5, 6)
    assert TTShape.for_table(1_000_000, 64, budget_params=640_000).order == 2
    assert TTShape.for_table(1_000_000, 64, budget_params=8_000).order > 2
    assert TTShape.for_table(1_000_000, 64, budget_params=640_000, order=4).order == 4
    linear = TTShape.for_linear(1024, 512)
    assert (linear.order, linear.ranks) == (4, (16, 16, 16))
    assert linear.col_shape[:2] == (1, 1) == linear.row_shape[2:]
    assert (linear.num_rows, linear.num_cols) == (1024, 512)
    assert linear.compression == 1024 * 512 / linear.num_params
    assert linear.with_ranks([16, 0, 16]).compression == math.inf
    assert TTShape.for_linear(1024, 512, tt_ranks=(4, 5, 6)).ranks == (4, 5, 6)
    assert TTShape.for_table(1000, 16, tt_ranks=torch.tensor(4)).ranks == (4,)  # type: ignore[arg-type]


MISTAKES: list[tuple[Callable[[], object], str]] = [
    *((lambda n=n: factorize(n, 2), "n is .*: give a positive integer") for n in (0, 2.0, "8", True, None)),
    *((lambda order=order: factorize(8, order), "order is .*: give an integer from 1 to 8") for order in (0, 9, 2.5, True)),
    (lambda: TTShape((4, 4), (2, 2, 2), 2), r"col_shape \(2, 2, 2\) has 3 modes but row_shape \(4, 4\) has 2"),
    (lambda: TTShape((4, 0), (2, 2), 2), r"row_shape\[1\] is 0: give a positive integer"),
    (lambda: TTShape((4, 4), (-2, 2), 2), r"col_shape\[0\] is -2: give a positive integer"),
    (lambda: TTShape((4, 4), (2, 2), (1, 2)), r"ranks \(1, 2\) has 2 entries: 2 modes need 1"),
    (lambda: TTShape((4, 4), (2, 2), (-1,)), r"ranks \(-1,\) must be non-negative integers"),
    (lambda: TTShape((1,) * 9, (1,) * 9, 1), "order is 9: give an integer from 1 to 8"),
    (lambda: TTShape.for_table(0, 16), "num_embeddings is 0: give a positive integer"),
    (lambda: TTShape.for_table(1000, 16, order=5), "order is 5: embedding tables take 2, 3 or 4 cores"),
    (lambda: TTShape((4, 4), (2, 2), 2.5), "ranks is 2.5: give a positive integer"),  # type: ignore[arg-type]
    (lambda: TTShape.for_table(1000, 16, tt_ranks=0), "tt_ranks is 0: give a positive integer"),
    (lambda: TTShape.for_table(1000, 16, tt_ranks=()), r"tt_ranks \(\) would need 1 cores"),
    (lambda: TTShape.for_table(1000, 16, tt_ranks=4, budget_params=100), "tt_ranks 4 and budget_params 100 are both given"),
    (lambda: TTShape.for_table(1000, 16, budget_params=0), "budget_params is 0: give a positive integer"),
    (lambda: TTShape.for_table(1000, 16, budget_params=20), r"budget_params is 20: a 1000 x 16 table takes at least \d+ param"),
    (lambda: tt_to_dense([torch.zeros(1, 4, 2, 1)], TTShape((3,), (2,), ())), "cores have shapes .* but the TTShape states"),
    (lambda: TTShape.for_linear(0, 32), "in_features is 0"),
    (lambda: TTShape.for_linear(64, 32, order=3), "order is 3: linear layers take 2, 4, 6 or 8 cores"),
    (lambda: TTShape.for_linear(64, 32, tt_ranks=(4, 4)), r"tt_ranks \(4, 4\) would need 3 cores"),
    (lambda: TTShape.for_linear(64, 32, budget_params=5), r"budget_params is 5: a 64 x 32 linear layer takes at least \d+ param"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[str(k) for k in range(len(MISTAKES))])
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    refuse(message, make)


@given(
    num_rows=st.sampled_from([1, 2, 97, 10_007, 2**31 - 1, 3 * 10**9 + 19, 10**12 + 39]), order=st.integers(1, 4), data=st.data()
)
def test_digits_round_trip(num_rows: int, order: int, data: st.DataObject) -> None:
    radices = factorize(num_rows, order)
    drawn = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=8))
    rows = torch.tensor([0, num_rows - 1, math.prod(radices) - 1, *drawn])
    digits = row_digits(rows, radices)
    assert len(digits) == order
    for digit, radix in zip(digits, radices, strict=True):
        assert digit.dtype == torch.int64
        assert int(digit.min()) >= 0
        assert int(digit.max()) < radix
    weights = [math.prod(radices[k + 1 :]) for k in range(order)]
    assert torch.equal(sum(digit * weight for digit, weight in zip(digits, weights, strict=True)), rows)


class OperatorCounter(TorchDispatchMode):
    """Counts products and scalings, and the numbers that they read and write; a scaling's diagonal isn't counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor):
            self.calls += 1
            self.numbers += out.numel()
            self.numbers += sum(x.numel() for x in args) if func is torch.ops.aten.mm.default else out.numel()
        return out


@pytest.mark.parametrize("order", [2, 4, 6])
def test_work_is_what_torch_does(order: int) -> None:
    shape = TTShape.for_linear(64, 64, tt_ranks=8, order=order)  # all sizes are multiples of a vector's
    shape = TTShape([max(m, 8) if m > 1 else 1 for m in shape.row_shape], [max(n, 8) if n > 1 else 1 for n in shape.col_shape], 8)
    cores = [torch.zeros(size) for size in shape.core_shapes]
    diagonals = [torch.zeros(rank) for rank in shape.ranks]
    with FlopCounterMode(display=False) as flops, OperatorCounter() as operators:
        tt_linear(torch.zeros(24, shape.num_rows), cores, diagonals, order // 2, shape.num_cols, None)
    assert tt_cost(shape, 24) == LAYER + flops.get_total_flops() // 2 + NUMBER * operators.numbers + CALL * operators.calls


def test_uninitialized_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tt_to_dense_is_the_sum_over_paths(order: int) -> None:
    row_shape, col_shape, ranks = (3, 2, 4, 2)[:order], (2, 3, 1, 2)[:order], (2, 3, 2)[: order - 1]
    shape = TTShape(row_shape, col_shape, ranks)
    cores = [torch.randn(size, dtype=torch.float64) for size in shape.core_shapes]
    dense = tt_to_dense(cores, shape)
    assert dense.shape == (shape.num_rows, shape.num_cols)
    for i, row in enumerate(itertools.product(*map(range, row_shape))):
        for j, column in enumerate(itertools.product(*map(range, col_shape))):
            product = torch.eye(1, dtype=torch.float64)
            for core, row_digit, column_digit in zip(cores, row, column, strict=True):
                product = product @ core[:, row_digit, column_digit, :]
            torch.testing.assert_close(dense[i, j], product[0, 0])


sizes = st.tuples(*[st.integers(0, 4)] * 4)


def stored(core: Tensor, k: int, order: int) -> list[float]:
    """A core's numbers in the order in which a lookup reads them: slice by slice, rank by rank."""
    numbers = []
    for of_slice in core.unbind(1):  # (r_{k-1}, n, r_k)
        by_rank = of_slice.permute(0, 2, 1) if k < (order + 1) // 2 else of_slice.permute(2, 0, 1)
        numbers += by_rank.flatten().tolist()
    return numbers


@given(size=sizes, order=st.integers(1, 4), data=st.data())
def test_slices_are_stored_one_after_the_other(size: tuple[int, ...], order: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, order - 1))
    core = torch.randn(size).permute(data.draw(st.permutations(range(4))))
    laid = slice_major(core, k, order)
    assert torch.equal(laid, core)
    assert is_slice_major(laid, k, order)
    assert laid.as_strided((laid.numel(),), (1,)).tolist() == stored(core, k, order)
    assert slice_major(laid, k, order) is laid


@given(order=st.integers(2, 4), data=st.data())
def test_the_operators_accept_only_slice_major_cores(order: int, data: st.DataObject) -> None:
    """They read memory in this order, regardless of strides."""
    k = data.draw(st.integers(0, order - 1))
    bonds = [1, *data.draw(st.lists(st.integers(0, 3), min_size=order - 1, max_size=order - 1)), 1]
    modes = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=order, max_size=order))
    cores = [
        slice_major(torch.randn(r, m, n, s), i, order)
        for i, (r, (m, n), s) in enumerate(zip(bonds, modes, bonds[1:], strict=False))
    ]
    axes = data.draw(st.permutations(range(4)))  # in this order in memory
    cores[k] = cores[k].permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])
    is_so = cores[k].as_strided((cores[k].numel(),), (1,)).tolist() == stored(cores[k], k, order)
    assert is_slice_major(cores[k], k, order) == is_so
    plan = plan_lookup([torch.tensor([0])], [[m for m, _ in modes]])
    arguments = (cores, [], list(plan), torch.tensor([0, 1]), None, False, [0], 1, 1, [], [])
    if is_so:
        torch.ops.comera_rec.pool(*arguments)
    else:
        refuse(rf"cores\[{k}\] is not a slice-major tensor on CPU: see slice_major", torch.ops.comera_rec.pool, *arguments)


def are_slice_major(table: cr.TTEmbeddingBag) -> bool:
    return all(is_slice_major(core, k, table.shape.order) for k, core in enumerate(table.cores()))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tables_keep_their_cores_slice_major(order: int) -> None:
    shape = TTShape((5, 4, 3, 2)[:order], (2, 3, 2, 2)[:order], (3, 4, 2)[: order - 1])

    def build(**arguments: object) -> cr.TTEmbeddingBag:
        return cr.TTEmbeddingBag(shape.num_rows, shape.num_cols, shape=shape, **arguments)  # type: ignore[arg-type]

    table = build()
    assert are_slice_major(table)
    for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert are_slice_major(again)
        assert all(map(torch.equal, again.parameters(), table.parameters()))
        assert again.core_0.data_ptr() != table.core_0.data_ptr()
    assert are_slice_major(copy.deepcopy(table).bfloat16())
    assert are_slice_major(build(device="meta").to_empty(device="cpu"))
    assert are_slice_major(cr.TTEmbeddingBag.from_dense(table.to_dense(), shape=shape))
    file = io.BytesIO()
    torch.save(table.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    for values in (state, {name: value.contiguous() for name, value in state.items()}):
        loaded = build()
        loaded.load_state_dict(values)
        assert are_slice_major(loaded)
        assert all(map(torch.equal, loaded.parameters(), table.parameters()))
