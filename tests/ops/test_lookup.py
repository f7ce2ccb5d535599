"""Rows of a train against rows of the dense matrix, and how many products they take."""

from __future__ import annotations

import pytest
import torch

from comera_rec.ops import check_ids, lookup, plan_lookup, tt_rows
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


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"order{shape.order}-{shape.ranks}")
def test_rows_and_gradients_match_the_dense_matrix(shape: TTShape, dtype: torch.dtype, static: bool) -> None:
    # A second table of other row modes shares the lookup.
    shapes = [shape, TTShape(tuple(m + 1 for m in shape.row_shape), shape.col_shape, shape.ranks)]
    trains = [[torch.randn(size, dtype=dtype, requires_grad=True) for size in each.core_shapes] for each in shapes]
    for count in (2, 1):
        tables = [each.num_rows for each in shapes[:count]]
        for ids in (
            [torch.arange(rows) for rows in tables],
            [torch.randint(rows, (9, 2), dtype=torch.int32) for rows in tables],
            [torch.tensor([0, rows - 1])[:t] for t, rows in enumerate(tables)],
        ):
            plan = plan_lookup(ids, [each.row_shape for each in shapes[:count]], static=static)
            found = tt_rows([(train, []) for train in trains[:count]], plan)[plan.inverse]
            dense = [tt_to_dense(train, each) for train, each in zip(trains, shapes, strict=True)]
            expected = torch.cat([table[rows.flatten().long()] for table, rows in zip(dense, ids, strict=False)])
            torch.testing.assert_close(found, expected)
            cores, weights = [core for train in trains[:count] for core in train], torch.randn_like(expected)
            torch.testing.assert_close(
                torch.autograd.grad((found * weights).sum(), cores), torch.autograd.grad((expected * weights).sum(), cores)
            )


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
    tt_rows([(cores, [])], plan_lookup([rows], [shape.row_shape]))
    assert products[-1] == 100
    assert sum(products[:-1]) <= {2: 0, 3: 100, 4: 101}[order]
