"""Rows of a train against rows of the dense matrix, and the dedup before them."""

from __future__ import annotations

import pytest
import torch

from comera_rec.ops import deduplicate, lookup, tt_rows
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
        found = tt_rows(cores, rows, shape, impl=impl)
        expected = tt_to_dense(cores, shape)[rows.long()]
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad((found * weights).sum(), cores), torch.autograd.grad((expected * weights).sum(), cores)
        )


def test_deduplicate_inverts() -> None:
    ids = torch.tensor([[5, 0, 5], [9, 9, 0]])
    batch = deduplicate(ids, 10)
    assert batch.rows.tolist() == [0, 5, 9]
    assert torch.equal(batch.rows[batch.inverse], ids)
    assert deduplicate(torch.tensor([], dtype=torch.int64), 10).rows.numel() == 0


@pytest.mark.parametrize(("ids", "bad"), [([3, 10], 10), ([-1, 3], -1), ([-7, 99], -7), ([2**40], 2**40)])
def test_ids_out_of_range_are_named(ids: list[int], bad: int) -> None:
    with pytest.raises(ValueError, match=rf"id {bad} is out of range for table 'user': its ids run from 0 to 9; check the data"):
        deduplicate(torch.tensor(ids), 10, table="table 'user'")


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
    tt_rows(cores, rows, shape)
    assert products[-1] == 100
    assert sum(products[:-1]) <= {2: 0, 3: 100, 4: 101}[order]
