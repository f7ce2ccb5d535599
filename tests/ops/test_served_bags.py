"""Bags for requests: the operator agrees with its definition, and the definition with the dense matrix."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from refusals import refuse
from torch import Tensor

from comera_rec.ops.served_bags import Packed, ServedTable, Slab, pack, served_bags
from comera_rec.ops.served_bags.reference import served_bags as reference

TOLERANCE = 1e-5
SHAPES = [  # row modes, column modes, ranks, columns kept, slabs (rows, width)
    ((37,), (8,), (), 8, ()),
    ((7, 11), (8, 8), (5,), 64, ((3, 64), (20, 3))),
    ((7, 11), (4, 3), (1,), 11, ()),
    ((5, 4, 3), (2, 4, 2), (3, 5), 16, ((9, 2),)),
    ((3, 2, 5, 2), (2, 3, 1, 2), (2, 6, 2), 12, ()),
    ((6, 6), (16, 8), (46,), 128, ((1, 1), (1, 1))),
    ((6, 6), (8, 16), (0,), 127, ()),
]
Blocks = tuple[tuple[int, int], ...]
Sizes = tuple[int, ...]


def table(
    row_modes: Sizes, col_modes: Sizes, ranks: Sizes, columns: int, slabs: Blocks, *, mean: bool = False, formed: int = 0
) -> ServedTable:
    bonds = (1, *ranks, 1)
    shapes = [(m, bonds[k], bonds[k + 1], n) for k, (m, n) in enumerate(zip(row_modes, col_modes, strict=True))]
    return ServedTable(
        rows=torch.tensor(row_modes).prod().item() - 1,
        columns=columns,
        mean=mean,
        formed=torch.randn(formed, columns),
        cores=tuple(torch.randn(shape) for shape in shapes),
        slabs=tuple(Slab(rows=torch.randn(rows, width), columns=torch.randn(width, columns)) for rows, width in slabs),
    )


def request_of(tables: list[ServedTable], batch: int, longest: int = 3) -> tuple[Tensor, Tensor]:
    """Draw ragged bags with every table's first and last id; neighboring bags share ids."""
    lengths = torch.randint(0, longest + 1, (len(tables), batch))
    lengths[:, batch // 2 :] = 1
    values = []
    for feature, table_lengths in zip(tables, lengths, strict=True):
        ids = torch.randint(0, feature.rows, (int(table_lengths.sum()),))
        ids[:1] = 0
        ids[-3:] = feature.rows - 1
        values.append(ids)
    return torch.cat(values), lengths.flatten()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_operator_equals_its_definition(shape: tuple, dtype: torch.dtype, mean: bool) -> None:
    columns = shape[3]
    dense = ServedTable(rows=19, columns=columns, mean=mean, formed=torch.randn(19, columns))
    tables = [table(*shape, mean=mean), dense, table(*shape, mean=mean, formed=5)]
    packed = pack(tables, dtype)
    values, lengths = request_of(tables, 9)
    for counts in (None, torch.tensor([0, 20, 6])):
        for weights in (None, torch.randn(len(values))):
            strided = torch.stack([values % 19 if counts is not None else values] * 2, dim=1)[:, 0]
            given = strided, lengths, columns
            actual, expected = (of(packed, *given, counts=counts, weights=weights) for of in (served_bags, reference))
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=1e-4)


def test_rows_are_those_of_the_dense_matrix() -> None:
    each = table((7, 11), (8, 8), (5,), 64, ((3, 4), (20, 3)))
    matrix = torch.einsum("plri,qrsj->pqlisj", *each.cores).reshape(77, 64)[:76]
    matrix[:3] += each.slabs[0].rows @ each.slabs[0].columns
    matrix[3:23] += each.slabs[1].rows @ each.slabs[1].columns
    rows = served_bags(pack([each], torch.float32), torch.arange(76), torch.ones(76).long(), 64)
    torch.testing.assert_close(rows[:, 0], matrix, rtol=TOLERANCE, atol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-7), (torch.int8, 1 / 127)], ids=str)
def test_few_bits_stay_close(dtype: torch.dtype, error: float) -> None:
    dense = ServedTable(rows=50, columns=7, mean=False, formed=torch.randn(50, 7))
    rows = served_bags(pack([dense], dtype), torch.arange(50), torch.ones(50).long(), 7)[:, 0]
    assert ((rows - dense.formed).abs() <= dense.formed.abs().amax(1, keepdim=True) * error / 2 + 1e-6).all()


def test_ids_beyond_32_bits() -> None:
    large = table((70_000, 70_000), (2, 2), (1,), 4, ())
    values = torch.tensor([0, 2**32 - 1, 2**32, 70_000**2 - 2])
    packed, lengths = pack([large], torch.int8), torch.ones(4).long()
    torch.testing.assert_close(served_bags(packed, values, lengths, 4), reference(packed, values, lengths, 4))


def test_threads_change_nothing(on_threads: Callable) -> None:
    tables = [table(*SHAPES[1]), table(*SHAPES[1], formed=9)]
    values, lengths = request_of(tables, 1000)
    packed = pack(tables, torch.int8)
    one, two = (on_threads(count, lambda: served_bags(packed, values, lengths, 64)) for count in (1, 2))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, reference(packed, values, lengths, 64), rtol=TOLERANCE, atol=1e-4)


def test_features_that_share_a_table_store_it_once() -> None:
    one = table(*SHAPES[1])
    assert len(pack([one, one], torch.float32).storage) == len(pack([one], torch.float32).storage)


@pytest.fixture
def packed() -> Packed:
    return pack([table(*SHAPES[1]), table(*SHAPES[1])], torch.float32)


def test_bad_requests(packed: Packed) -> None:
    for values, lengths, message in (
        ([1, 2, 3, 76], [1, 1, 1, 1], "id 76 is out of range for feature 1: its ids run from 0 to 75"),
        ([-1, 2, 3, 4], [2, 0, 0, 2], "id -1 is out of range for feature 0: its ids run from 0 to 75"),
        ([1, 2, 3, 4], [1, 1, 1, 2], "lengths are below 0 or add up to more than the 4 values"),
        ([1, 2, 3, 4], [5, -1, 0, 0], "lengths are below 0 or add up to more than the 4 values"),
        ([1, 2, 3, 4], [1, 1, 1], "lengths holds 3 numbers for 2 features: give as many for each"),
    ):
        refuse(message, served_bags, packed, torch.tensor(values), torch.tensor(lengths), 64)
    ones = torch.ones(4).long()
    for counts in ([3, 2], [-1, 2]):
        refuse(
            "counts, or lengths by feature, are below 0 or add up to more than 4",
            served_bags,
            packed,
            ones,
            ones,
            64,
            counts=torch.tensor(counts),
        )
    refuse("weights don't hold 4 numbers: give one for each value", served_bags, packed, ones, ones, 64, weights=torch.ones(3))


def test_random_layouts_never_read_outside_the_storage(packed: Packed) -> None:
    values, lengths = torch.tensor([75, 1, 75, 2]), torch.ones(4).long()
    refused = 0  # sanitizers check the other calls
    for number in range(packed.layout.shape[1]):
        for changed in (-1, 3, 2**20, 2**40, 2**62):
            layout = packed.layout.clone()
            layout[0, number] = changed
            with contextlib.suppress(ValueError):
                served_bags(packed._replace(layout=layout), values, lengths, 64)
                refused -= 1
            refused += 1
    assert refused > 50
