"""Plans against their definition in plain Python: those of the compiled steps, and those of the steps whose sizes are static."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS
from torch import Tensor

from comera_rec.ops import LookupPlan, plan_lookup
from comera_rec.ops.plan import Product
from comera_rec.tt import row_digits

Node = Product | Tensor | int


def without_padding(ids: Tensor) -> list[int]:
    found = [i for i in ids.tolist() if i >= 0]
    assert ids[len(found) :].eq(-1).all(), "padding comes last"
    return found


def levels(node: Node) -> list[list[tuple[int, int]]]:
    """Of every product of parts: which meets which."""
    if not isinstance(node, Product):
        return []
    return [list(zip(without_padding(node.p), without_padding(node.q), strict=True)), *levels(node.left), *levels(node.right)]


def slices(node: Node, u: int) -> tuple[int, ...]:
    """Which slice of each core makes row u."""
    if isinstance(node, Product):
        return slices(node.left, int(node.p[u])) + slices(node.right, int(node.q[u]))
    return (u if isinstance(node, int) else int(node[u]),)


def check(plan: LookupPlan, ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]]) -> None:
    lookups = [(table, row) for table, of_table in enumerate(ids) for row in of_table.flatten().tolist()]
    rows, count = sorted(set(lookups)), Counter(lookups)
    assert [rows[u] for u in plan.inverse.tolist()] == lookups
    assert plan.order.tolist() == sorted(range(len(lookups)), key=lambda i: lookups[i]), "equal ids keep their order"
    assert plan.starts[: len(rows) + 1].tolist() == [0, *accumulate(count[row] for row in rows)]
    assert plan.starts[len(rows) :].eq(len(lookups)).all()
    for u, (table, row) in enumerate(rows):
        digits = row_digits(torch.tensor(row), row_shapes[table])
        before = [sum(modes) for modes in zip(*row_shapes[:table], strict=True)] or [0] * len(digits)
        assert slices(plan.rows, u) == tuple(first + int(digit) for first, digit in zip(before, digits, strict=True))
    for level in levels(plan.rows):
        assert len(set(level)) == len(level), "every product once"


def check_both(ids: Sequence[Tensor], row_shapes: Sequence[Sequence[int]]) -> None:
    compiled, static = (plan_lookup(ids, row_shapes, static=static) for static in (False, True))
    check(compiled, ids, row_shapes)
    check(static, ids, row_shapes)
    assert levels(compiled.rows) == levels(static.rows)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Tensor], list[list[int]]]:
    order, dtype = draw(st.integers(1, 5)), draw(st.sampled_from([torch.int32, torch.int64]))
    row_shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=order, max_size=order), min_size=1, max_size=4))
    ids = []
    for shape in row_shapes:
        last = int(torch.tensor(shape).prod()) - 1
        rows = torch.tensor(draw(st.lists(st.integers(0, last), max_size=30)), dtype=dtype)
        rows = rows.view(-1, 2) if len(rows) % 2 == 0 else rows
        ids.append(draw(st.sampled_from(LAYOUTS))(rows))
    return ids, row_shapes


@settings(max_examples=100)
@given(batches())
def test_any_batch(batch: tuple[list[Tensor], list[list[int]]]) -> None:
    check_both(*batch)


@pytest.mark.parametrize(
    "row_shapes",
    [
        # Sizes about those at which the sort of the ids takes one pass more.
        pytest.param([(m,) for m in (1, 2, 3, 2**11 - 1, 2**11, 2**11 + 1, 2**22, 2**22 + 1, 2**31, 2**33 + 5)], id="one core"),
        pytest.param([(2**16, 2**15), (3, 7), (2**20 - 3, 2**21)], id="up to 2^41 rows"),
        pytest.param([(2**11, 2**10, 2**10, 2**9), (3, 1, 1, 2)], id="four cores, 2^40 rows"),
        pytest.param([(3, 5), (2**30, 2**31), (2, 2)], id="ids too long to be packed with their places"),
    ],
)
def test_large_tables(row_shapes: list[tuple[int, ...]]) -> None:
    ids = []
    for shape in row_shapes:
        size = int(torch.tensor(shape).prod())
        ids.append(torch.cat([torch.tensor([size - 1, 0, size // 2, size - 1]), torch.randint(size, (20,))]))
    check_both(ids, row_shapes)


def test_plans_do_not_depend_on_the_number_of_threads(on_threads: Callable) -> None:
    row_shapes = [(40, 30), (7, 9), (500, 400), (1, 1), (20, 100)]
    ids = [torch.randint(m * n, (3000,)) for m, n in row_shapes]
    one, two = (on_threads(count, lambda: plan_lookup(ids, row_shapes)) for count in (1, 2))
    assert torch.equal(one.order, two.order)
    assert torch.equal(one.inverse, two.inverse)
    assert levels(one.rows) == levels(two.rows)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_static_sizes_follow_from_the_shapes_of_the_ids(order: int) -> None:
    def sizes(node: Node) -> list[torch.Size]:
        if isinstance(node, Product):
            return [node.p.shape, node.q.shape, *sizes(node.left), *sizes(node.right)]
        return [node.shape] if isinstance(node, Tensor) else []

    row_shapes = [(4, 3, 2, 5, 2)[:order], (2, 6, 1, 3, 2)[:order]]
    batches = [torch.zeros(2, 7, dtype=torch.int64)], [torch.randint(2, (14,))], [torch.arange(14) % 4]
    plans = [plan_lookup([ids, ids[:0]], row_shapes, static=True) for (ids,) in batches]
    assert len({(p.inverse.shape, p.order.shape, p.starts.shape, *sizes(p.rows)) for p in plans}) == 1


def test_the_default_is_static_only_where_sizes_must_be() -> None:
    ids = torch.tensor([5, 5, 5])
    assert len(plan_lookup([ids], [(5, 2)]).starts) == 2
    assert len(plan_lookup([ids.to("meta")], [(5, 2)]).starts) == 4


def test_a_plan_of_few_ids() -> None:
    plan = plan_lookup([torch.tensor([[5, 0, 5], [9, 9, 0]])], [(5, 2)])
    assert isinstance(plan.rows, Product)
    assert (plan.rows.p.tolist(), plan.rows.q.tolist()) == ([0, 2, 4], [0, 1, 1])
    assert plan.inverse.tolist() == [1, 0, 1, 2, 2, 0]
    assert plan.order.tolist() == [1, 5, 0, 2, 3, 4]
    assert plan.starts.tolist() == [0, 2, 4, 6]
