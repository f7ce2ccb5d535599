"""Plans agree with their definition in plain Python: every field of the compiled operator's plans."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from bag_tables import LAYOUTS
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor

from comera_rec.ops import plan_lookup
from comera_rec.tt import row_digits

Shapes = Sequence[Sequence[int]]
MOST = 2**31 - 1


def definition(ids: Sequence[Tensor], row_shapes: Shapes) -> dict[str, list]:
    """The fields of a plan of two cores or more as lists."""
    order = len(row_shapes[0])
    cut = (order + 1) // 2
    lookups = [(table, row) for table, table_ids in enumerate(ids) for row in table_ids.flatten().tolist()]
    rows, count = sorted(set(lookups)), Counter(lookups)
    number = {row: u for u, row in enumerate(rows)}
    first_slices = [[0, *accumulate(modes)] for modes in zip(*row_shapes, strict=True)]

    def slices(table: int, row: int) -> tuple[int, ...]:
        digits = row_digits(torch.tensor(row), row_shapes[table])
        return tuple(firsts[table] + int(digit) for firsts, digit in zip(first_slices, digits, strict=True))

    # Slices are numbered over all tables, so ascending products are ordered by table.
    halves = [(made[:cut], made[cut:]) for made in (slices(*row) for row in rows)]
    lefts, rights = (sorted({half[side] for half in halves}) for side in (0, 1))
    left_numbers, right_numbers = ({half: number for number, half in enumerate(each)} for each in (lefts, rights))
    p = [left[0] if order < 3 else left_numbers[left] for left, _ in halves]
    q = [right[0] if order < 4 else right_numbers[right] for _, right in halves]
    padded = lambda values: [*values, *[-1] * (len(lookups) - len(values))]  # noqa: E731
    first_of = lambda halves, core: [sum(half[0] < first for half in halves) for first in first_slices[core]]  # noqa: E731
    return {
        "inverse": [number[lookup] for lookup in lookups],
        "order": sorted(range(len(lookups)), key=lambda i: lookups[i]),  # equal ids keep their order
        "starts": [*accumulate((count[row] for row in rows), initial=0), *[len(lookups)] * (len(lookups) - len(rows))],
        "rows": [padded(p), padded(q)],
        "left": [padded([left[k] for left in lefts]) for k in (0, 1)] if order > 2 else [[], []],
        "right": [padded([right[k] for right in rights]) for k in (1, 0)] if order > 3 else [[], []],
        "bounds": [
            [sum(row[0] < table for row in rows) for table in range(len(ids) + 1)],
            first_of(lefts, 0) if order > 2 else [0] * (len(ids) + 1),
            first_of(rights, 2) if order > 3 else [0] * (len(ids) + 1),
            *first_slices,
        ],
    }


def check(ids: Sequence[Tensor], row_shapes: Shapes) -> None:
    plan = plan_lookup(ids, row_shapes)._asdict()
    assert all(tensor.dtype == torch.int32 for tensor in plan.values())
    assert {name: tensor.tolist() for name, tensor in plan.items()} == definition(ids, row_shapes)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Tensor], list[list[int]]]:
    order, dtype = draw(st.integers(2, 4)), draw(st.sampled_from([torch.int32, torch.int64]))
    row_shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=order, max_size=order), min_size=1, max_size=4))
    ids = []
    for shape in row_shapes:
        rows = torch.tensor(draw(st.lists(st.integers(0, math.prod(shape) - 1), max_size=30)), dtype=dtype)
        rows = rows.view(-1, 2) if len(rows) % 2 == 0 else rows
        ids.append(draw(st.sampled_from(LAYOUTS))(rows))
    return ids, row_shapes


@settings(max_examples=100)
@given(batches())
def test_any_batch(batch: tuple[list[Tensor], list[list[int]]]) -> None:
    check(*batch)


@settings(max_examples=40)
@given(
    order=st.integers(2, 4),
    counts=st.lists(st.sampled_from([0, 1, 511, 512, 513, 900]), min_size=1, max_size=3),
    largest=st.sampled_from([3, 20, 70]),
    skew=st.sampled_from([1, 6]),
    seed=st.integers(0, 99),
)
def test_ids_around_the_limit_of_the_radix_sort(order: int, counts: list[int], largest: int, skew: int, seed: int) -> None:
    """It starts at 513 ids, and for four cores also at 513 rows."""
    torch.manual_seed(seed)
    row_shapes = [torch.randint(1, largest, (order,)).tolist() for _ in counts]
    ids = [
        (torch.rand(count, dtype=torch.float64) ** skew * math.prod(shape)).long()
        for count, shape in zip(counts, row_shapes, strict=True)
    ]
    check(ids, row_shapes)


def ids_in(row_shapes: Shapes, count: int = 20) -> list[Tensor]:
    """Draw ids of every table: the first row twice, the last row, and random ones."""
    sizes = [math.prod(shape) for shape in row_shapes]
    return [torch.cat([torch.tensor([size - 1, 0, size // 2, size - 1]), torch.randint(size, (count,))]) for size in sizes]


@pytest.mark.parametrize(
    "row_shapes",
    [
        # Sizes around those at which sorting the ids takes one more pass.
        pytest.param([(m, 1) for m in (1, 2, 2**12, 2**12 + 1, 2**24, 2**24 + 1, 2**30)], id="one to three passes"),
        pytest.param([(2**16, 2**15), (3, 7), (2**20 - 3, 2**20)], id="two cores, up to 2^40 rows"),
        pytest.param([(2**14, 5, 2**24), (3, 1, 1), (2, 2, 2)], id="three cores, 2^40 rows"),
        pytest.param([(2**11, 2**10, 2**10, 2**9), (3, 1, 1, 2)], id="four cores, 2^40 rows"),
    ],
)
def test_large_tables(row_shapes: Shapes) -> None:
    check(ids_in(row_shapes), row_shapes)


def test_more_rows_and_ids_than_a_word_has_bits_for_are_refused() -> None:
    row_shapes = [(3, 5), (2**27, 2**27)]
    check(ids_in(row_shapes, 200), row_shapes)
    refuse("table 1 has too many rows for 304 ids: look up fewer at a time", plan_lookup, ids_in(row_shapes, 300), row_shapes)


def test_plans_do_not_depend_on_the_number_of_threads(on_threads: Callable) -> None:
    for row_shapes in (
        [(40, 30), (7, 9), (500, 400), (1, 1), (20, 100)],
        [(40, 30, 3, 50), (7, 9, 1, 1), (500, 4, 4, 10), (1, 1, 1, 1), (20, 10, 3, 100)],
    ):
        ids = [torch.randint(math.prod(shape), (3000,)) for shape in row_shapes]
        one, two = (on_threads(count, lambda ids=ids, shapes=row_shapes: plan_lookup(ids, shapes)) for count in (1, 2))
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_sizes_follow_from_the_shapes_of_the_ids(order: int, impl: str) -> None:
    row_shapes = [(4, 3, 2, 5)[:order], (2, 6, 1, 3)[:order]]
    batches = [torch.zeros(2, 7, dtype=torch.int64), torch.randint(2, (14,)), torch.arange(14) % 4]
    plans = [plan_lookup([ids, ids[:0]], row_shapes, impl=impl) for ids in batches]
    assert len({tuple(tensor.shape for tensor in plan) for plan in plans}) == 1
    meta = plan_lookup([torch.zeros(count, dtype=torch.int64, device="meta") for count in (14, 0)], row_shapes)
    as_on_meta = [(tensor.shape, tensor.dtype) for tensor in plan_lookup([batches[1], batches[1][:0]], row_shapes)]
    assert [(tensor.shape, tensor.dtype) for tensor in meta] == as_on_meta
    assert all(tensor.is_meta for tensor in meta)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("count", [3, 600])
def test_ids_out_of_range_name_their_table_and_the_limit(order: int, count: int, dtype: torch.dtype) -> None:
    row_shapes = [(9, 4, 3, 2)[:order], (5, 2, 1, 3)[:order]]
    size = math.prod(row_shapes[1])
    good = [torch.arange(count, dtype=dtype) % 8, torch.arange(count, dtype=dtype) % size]
    for bad in (-1, size, -(2**31), 2**31 - 1, *((2**40, -(2**63), 2**63 - 1) if dtype == torch.int64 else ())):
        ids = [good[0], good[1].clone()]
        ids[1][count // 2] = bad
        refuse(rf"ids\[1\] holds {bad}, which is out of range: ids run from 0 to {size - 1}$", plan_lookup, ids, row_shapes)
    ids = [torch.arange(8, dtype=dtype), good[1]]
    refuse(r"ids\[0\] holds 7, which is out of range: ids run from 0 to 6", plan_lookup, ids, row_shapes, [7, size])


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_ids_of_other_types_are_refused(dtype: torch.dtype, impl: str) -> None:
    with pytest.raises(ValueError, match=rf"ids\[1\] has dtype {dtype}: give int32 or int64"):
        plan_lookup([torch.tensor([1]), torch.zeros(3, dtype=dtype)], [(5, 2), (2, 2)], impl=impl)


@pytest.mark.parametrize(
    ("ids", "num_rows", "row_shapes", "message"),
    [
        ([torch.tensor([0])], [4, 4], [2, 2], "num_embeddings holds 2 numbers for 1 tables"),
        ([torch.tensor([0])], [2], [2], "row_shapes holds 1 numbers for 1 tables: give the 2, 3 or 4 row modes of each"),
        ([torch.tensor([0])], [32], [2] * 5, "row_shapes holds 5 numbers for 1 tables: give the 2, 3 or 4 row modes of each"),
        ([torch.tensor([0])], [4], [2, 0], "row_shapes holds 0: row modes are positive"),
        ([torch.tensor([0])], [5], [2, 2], r"num_embeddings\[0\] is 5, but its row modes make 4 rows: give a number from 1"),
        ([torch.tensor([0])], [0], [2, 2], r"num_embeddings\[0\] is 0, but its row modes make 4 rows: give a number from 1"),
        ([torch.tensor([0])], [4], [2**30, 2**31], f"row_shapes holds modes m_2 that add up to more than {MOST} slices"),
        ([torch.tensor([0])] * 2, [4] * 2, [2**30, 4] * 2, f"row_shapes holds modes m_1 that add up to more than {MOST} slices"),
        ([torch.tensor([0])], [4], [2**16, 2**15, 4], f"row_shapes of table 0 has a half of more than {MOST} products"),
        ([torch.tensor([0.0])], [4], [2, 2], r"ids\[0\] is neither int64 nor int32: convert it"),
    ],
)
def test_the_operator_refuses_bad_arguments(ids: list[Tensor], num_rows: list[int], row_shapes: list[int], message: str) -> None:
    refuse(message, torch.ops.comera_rec.plan_lookup, ids, num_rows, row_shapes)
