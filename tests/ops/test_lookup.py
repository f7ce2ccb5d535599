"""Rows of a train against rows of the dense matrix, and the dedup before them."""

from __future__ import annotations

import pytest
import torch

from comera_rec.ops import check_ids, lookup, plan_lookup, stack_cores, tt_rows
from comera_rec.ops.gathered_matmul import IMPLEMENTATIONS
from comera_rec.tt import TTShape, tt_to_dense

SHAPES = [
    TTShape((7,), (5,), ()),
    TTShape((5, 4), (3, 2), (4,)),
    TTShape((5, 4), (3, 2), (0,)),
    TTShape((5, 4), (1, 1), (1,)),
    TTShape((5, 4, 3), (2, 3, 2), (4, 3)),
    TTShape((3, 1, 5), (2, 1, 2), (2, 3)),
    TTShape((3, 4, 2, 3), (2, 1, 2, 3), (3, 5, 2)),
    TTShape((2, 2, 3, 2, 2), (1, 2, 1, 2, 1), (2, 3, 3, 2)),
]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"order{shape.order}-{shape.ranks}")
def test_rows_and_gradients_match_the_dense_matrix(shape: TTShape, impl: str) -> None:
    cores = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in shape.core_shapes]
    for rows in (
        torch.arange(shape.num_rows),
        torch.tensor([0, shape.num_rows - 1]),
        torch.tensor([shape.num_rows // 2], dtype=torch.int32),
        torch.tensor([], dtype=torch.int64),
    ):
        plan = plan_lookup([rows], [shape.row_shape])
        found = tt_rows(stack_cores([cores]), plan.digits, impl=impl)[plan.inverse]
        expected = tt_to_dense(cores, shape)[rows.long()]
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad((found * weights).sum(), cores), torch.autograd.grad((expected * weights).sum(), cores)
        )


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_one_lookup_serves_tables_of_different_row_modes(order: int) -> None:
    generator = torch.Generator().manual_seed(order)
    row_shapes = [(7, 3, 2, 5)[:order], (1, 4, 6, 2)[:order], (10, 2, 3, 3)[:order]]
    shapes = [TTShape(row_shape, (2, 3, 1, 2)[:order], (4, 3, 2)[: order - 1]) for row_shape in row_shapes]
    trains = [[torch.randn(size, dtype=torch.float64, requires_grad=True) for size in shape.core_shapes] for shape in shapes]
    ids = [torch.randint(0, shape.num_rows, (2 * shape.num_rows,), generator=generator) for shape in shapes]
    plan = plan_lookup(ids, row_shapes)
    found = tt_rows(stack_cores(trains), plan.digits)[plan.inverse]
    expected = torch.cat([tt_to_dense(train, shape)[i] for train, shape, i in zip(trains, shapes, ids, strict=True)])
    torch.testing.assert_close(found, expected)
    assert len(plan.digits[0]) == sum(len(i.unique()) for i in ids)
    weights = torch.randn_like(expected)
    cores = [core for train in trains for core in train]
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), cores), torch.autograd.grad((expected * weights).sum(), cores)
    )


def test_plan_inverts() -> None:
    ids = torch.tensor([[5, 0, 5], [9, 9, 0]])
    plan = plan_lookup([ids], [(5, 2)])
    assert [digit.tolist() for digit in plan.digits] == [[0, 2, 4], [0, 1, 1]]
    assert plan.inverse.tolist() == [[1, 0, 1], [2, 2, 0]]
    assert plan_lookup([torch.tensor([], dtype=torch.int64)], [(5, 2)]).digits[0].numel() == 0


@pytest.mark.parametrize(("ids", "bad"), [([3, 10], 10), ([-1, 3], -1), ([-7, 99], -7), ([2**40], 2**40)])
def test_ids_out_of_range_are_named(ids: list[int], bad: int) -> None:
    with pytest.raises(ValueError, match=rf"id {bad} is out of range for table 'user': its ids run from 0 to 9; check the data"):
        check_ids(torch.tensor(ids), 10, "table 'user'")


@pytest.mark.parametrize("order", [2, 3, 4])
def test_each_slice_product_is_computed_once(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory follows unique rows and unique digit tuples: the sizes of the products show it."""
    products = []
    original = lookup.gathered_matmul

    def spy(a, b, p, q, impl):  # type: ignore[no-untyped-def]
        products.append(len(p))
        return original(a, b, p, q, impl)

    monkeypatch.setattr(lookup, "gathered_matmul", spy)
    shape = TTShape((10,) * order, (2,) * order, 3)
    cores = [torch.randn(size) for size in shape.core_shapes]
    rows = torch.arange(100)  # neighbours: one leading digit, ten last digits
    tt_rows(stack_cores([cores]), plan_lookup([rows], [shape.row_shape]).digits)
    assert products[-1] == 100
    assert sum(products[:-1]) <= {2: 0, 3: 100, 4: 101}[order]
