"""Bags of rows of tensor trains against torch's embedding_bag over the dense tables: values and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag
from comera_rec.ops import LookupPlan, bags, plan_lookup, tt_bags
from comera_rec.tt import TTShape


def make_tables(
    row_shapes: Sequence[Sequence[int]], col_shape: Sequence[int], ranks: Sequence[int], num_cols: int | None = None
) -> list[TTEmbeddingBag]:
    """Tables whose trains differ in their row modes, of random rank parameters."""
    tables = []
    for row_shape in row_shapes:
        shape = TTShape(tuple(row_shape), tuple(col_shape), tuple(ranks))
        table = TTEmbeddingBag(shape.num_rows, num_cols or shape.num_cols, shape=shape)
        for parameter in table.rank_parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        tables.append(table)
    return tables


def trains(tables: list[TTEmbeddingBag]) -> list[Any]:
    return [table.forward_parameters() for table in tables]


def pool(
    tables: list[TTEmbeddingBag],
    ids: list[Tensor],
    offsets: Tensor,
    *,
    static: bool = False,
    plan: LookupPlan | None = None,
    **arguments: Any,
) -> Tensor:
    plan = plan or plan_lookup(ids, [table.shape.row_shape for table in tables], static=static)
    return tt_bags(trains(tables), plan, offsets, num_cols=tables[0].embedding_dim, **arguments)


def pool_dense(
    tables: list[TTEmbeddingBag], ids: list[Tensor], offsets: Tensor, *, features: int = 1, mode: str = "sum", **arguments: Any
) -> Tensor:
    rows = torch.cat([table.dense_matrix()[of_table.long()] for table, of_table in zip(tables, ids, strict=True)])
    # Torch takes the last bag to go on to the last id: here another one takes what is in none.
    pooled = F.embedding_bag(torch.arange(len(rows)), rows, offsets.long(), mode=mode, **arguments)[:-1]
    return pooled.unflatten(0, (features, -1)).transpose(0, 1).flatten(1)


def differentiate(
    function: Callable[..., Tensor], tables: list[TTEmbeddingBag], *batch: object, grad: Tensor | None = None, **arguments: Any
) -> list[Tensor]:
    """Output and the gradients of all parameters, and of weights if there are."""
    inputs: list[Tensor] = [parameter for table in tables for parameter in table.parameters()]
    if "per_sample_weights" in arguments:
        arguments["per_sample_weights"] = arguments["per_sample_weights"].to(inputs[0].dtype).detach().requires_grad_()
        inputs.append(arguments["per_sample_weights"])
    out = function(tables, *batch, **arguments)
    grad = torch.linspace(-1, 2, out.numel()).view_as(out) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def check(tables: list[TTEmbeddingBag], *batch: object, static: bool = False, **arguments: Any) -> None:
    """Compare with float64 up to 1e-5 of the largest value."""
    found = differentiate(pool, tables, *batch, static=static, **arguments)
    expected = differentiate(pool_dense, [copy.deepcopy(table).double() for table in tables], *batch, **arguments)
    for tensor, exact in zip(found, expected, strict=True):
        atol = 1e-5 * exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=atol)


def numbers(lowest: int, highest: int, count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(lowest, highest), min_size=count, max_size=count)


@settings(max_examples=200)
@given(data=st.data())
def test_any_bags(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    order, features = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row_shapes = [draw(numbers(1, 4, order)) for _ in range(draw(st.integers(1, 3)))]
    col_shape, ranks = draw(numbers(1, 5, order)), draw(numbers(1, 5, order - 1))
    width = TTShape(tuple(row_shapes[0]), tuple(col_shape), tuple(ranks)).num_cols
    tables = make_tables(row_shapes, col_shape, ranks, num_cols=draw(st.sampled_from([width, max(1, width - 1)])))
    index, lay = draw(st.sampled_from([torch.int32, torch.int64])), draw(st.sampled_from(LAYOUTS))
    ids = [lay(torch.randint(table.num_embeddings, (draw(st.integers(0, 12)),), dtype=index)) for table in tables]
    count = sum(map(len, ids))
    if count % features == 0 and draw(st.booleans()):
        offsets = torch.arange(count + 1)  # of bags of one id each
    else:
        bounds = draw(numbers(0, count, features * draw(st.integers(0, 4))))
        offsets = torch.tensor([0, *sorted(bounds)])
    arguments: dict[str, Any] = {"features": features, "mode": draw(st.sampled_from(["sum", "mean", "max"]))}
    if arguments["mode"] == "sum" and draw(st.booleans()):
        arguments["per_sample_weights"] = lay(torch.randn(count))
    grad = lay(torch.randn((len(offsets) - 1) // features, features * tables[0].embedding_dim))
    # Rows that fit no buffer are made and pooled in several passes.
    with mock.patch.object(bags, "ROW_BUFFER_BYTES", draw(st.sampled_from([1, 200, 1 << 30]))):
        check(tables, ids, offsets.to(index), static=draw(st.booleans()), grad=grad, **arguments)


def lookups(tables: list[TTEmbeddingBag], count: int) -> list[Tensor]:
    return [(torch.rand(count) ** 3 * table.num_embeddings).long() for table in tables]


@pytest.mark.parametrize("grad", [torch.ones(1).expand(9, 48), torch.rand(48, 9).T], ids=["expanded", "transposed"])
@pytest.mark.parametrize(
    "offsets", [torch.arange(28), torch.tensor([0, 9, 9, *range(9, 34)]).clamp(max=27)], ids=["one id", "jagged"]
)
def test_gradients_from_above_in_any_layout(offsets: Tensor, grad: Tensor) -> None:
    tables = make_tables([(5, 4), (7, 3), (2, 2)], (4, 4), (3,))
    check(tables, lookups(tables, 9), offsets, features=3, grad=grad)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_long_bags_of_few_rows(mode: str, static: bool) -> None:
    tables = make_tables([(3, 2)], (8, 9), (20,))
    check(tables, lookups(tables, 700), torch.tensor([0, 600, 600, 601, 700]), mode=mode, static=static)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_in_no_bag_have_no_gradient(mode: str, static: bool) -> None:
    tables = make_tables([(5, 4)], (2, 3), (3,))
    ids, offsets = [torch.tensor([7, 1, 19, 1, 12])], torch.tensor([0, 1, 2])
    weights = {"per_sample_weights": torch.randn(5)} if mode == "sum" else {}
    grad = torch.tensor([[torch.inf], [1.0]]).expand(2, 6)
    _, core, *_ = differentiate(pool, tables, ids, offsets, static=static, mode=mode, grad=grad)
    assert core[:, 2:].eq(0).all(), "ids beyond the bags have leading digits from 3, and nothing of the first bag's gradient"
    check(tables, ids, offsets, mode=mode, static=static, **weights)
    check(tables, ids, torch.tensor([0]), mode=mode, static=static, **weights)


@pytest.mark.parametrize("per_bag", [1, 3])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_results_do_not_depend_on_the_number_of_threads(mode: str, per_bag: int, weighted: bool, on_threads: Callable) -> None:
    tables = make_tables([(30, 20, 10), (5, 4, 3), (7, 70, 7)], (4, 4, 4), (8, 8))
    ids = lookups(tables, 3000)
    arguments = {"per_sample_weights": torch.randn(9000)} if weighted else {}
    run = lambda: differentiate(pool, tables, ids, torch.arange(0, 9001, per_bag), features=3, mode=mode, **arguments)  # noqa: E731
    with mock.patch.object(bags, "ROW_BUFFER_BYTES", 1 << 18), mock.patch.object(bags, "SLICES_AT_ONCE", 50):
        one, two, again = (on_threads(count, run) for count in (1, 2, 2))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(one, two, again, strict=True))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_plan_can_be_used_again(order: int) -> None:
    tables = make_tables([(4, 3, 2)[:order], (5, 2, 2)[:order]], (2, 3, 2)[:order], (3, 2)[: order - 1])
    ids, offsets = lookups(tables, 10), torch.arange(0, 21, 2)
    plan = plan_lookup(ids, [table.shape.row_shape for table in tables])
    one, two = (differentiate(pool, tables, ids, offsets, plan=plan) for _ in range(2))
    assert all(map(torch.equal, one, two))
    check(tables, ids, offsets)


@pytest.mark.parametrize("slices", [1, 5, 4096])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("order", [3, 4, 5])
def test_nested_products(order: int, static: bool, slices: int) -> None:
    row_shapes = [(5, 4, 3, 2, 2)[:order], (7, 3, 1, 2, 3)[:order], (2, 2, 2, 1, 1)[:order]]
    tables = make_tables(row_shapes, (4, 2, 3, 1, 2)[:order], (5, 3, 4, 2)[: order - 1])
    with mock.patch.object(bags, "SLICES_AT_ONCE", slices):
        check(tables, lookups(tables, 60), torch.arange(181), features=3, static=static)
        check(tables, lookups(tables, 60), torch.arange(0, 181, 4), features=3, static=static, per_sample_weights=torch.rand(180))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_graph_can_be_used_again(order: int) -> None:
    tables = make_tables([(4, 3, 2, 2)[:order], (5, 2, 2, 3)[:order]], (2, 3, 2, 1)[:order], (3, 2, 3)[: order - 1])
    out = pool(tables, lookups(tables, 10), torch.arange(0, 21, 2))
    parameters = [parameter for table in tables for parameter in table.parameters()]
    with mock.patch.object(bags, "SLICES_AT_ONCE", 2):
        one, two = (torch.autograd.grad(out.square().sum(), parameters, retain_graph=True) for _ in range(2))
        together = torch.autograd.grad(out.square().sum() + out.square().sum(), parameters)
    assert all(map(torch.equal, one, two))
    torch.testing.assert_close(together, tuple(2 * gradient for gradient in one))


@pytest.mark.parametrize("mode", ["sum", "max"])  # compiled, and in plain torch
@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2, 1, 3], [0, 4], [-1, 3]])
def test_offsets_that_do_not_ascend_are_refused(offsets: list[int], mode: str) -> None:
    with pytest.raises(ValueError, match="offsets must ascend from 0 to at most 3, the number of ids"):
        pool(make_tables([(5, 4)], (2, 3), (2,)), [torch.tensor([3, 4, 3])], torch.tensor(offsets, dtype=torch.int64), mode=mode)


def test_weights_that_are_not_one_for_each_id_are_refused() -> None:
    tables, ids = make_tables([(5, 4)], (2, 3), (2,)), [torch.tensor([3, 4, 3])]
    with pytest.raises(ValueError, match="there are 2 per_sample_weights for 3 ids: give one for each"):
        pool(tables, ids, torch.tensor([0, 3]), per_sample_weights=torch.ones(2))


def test_a_plan_for_larger_tables_is_refused() -> None:
    tables = make_tables([(5, 4)], (2, 3), (2,))
    for ids in ([20], [40, 3]):
        plan = plan_lookup([torch.tensor(ids)], [(99, 4)])
        with pytest.raises(IndexError, match=r"p holds .*, but there are 5 slices"):
            tt_bags(trains(tables), plan, torch.tensor([0, len(ids)]), num_cols=6)
        with pytest.raises(IndexError, match=r"p holds .*, but there are 5 slices"):
            tt_bags(trains(tables), plan, torch.arange(len(ids) + 1), num_cols=6)


def test_a_plan_for_other_tables_is_refused() -> None:
    tables = make_tables([(5, 2), (2, 5)], (2, 3), (2,))
    plan = plan_lookup([torch.tensor([24]), torch.tensor([3])], [(5, 5), (2, 2)])
    with pytest.raises(IndexError, match="q holds slices of other tables than p: give a plan for these tables"):
        tt_bags(trains(tables), plan, torch.arange(3), num_cols=6, features=2)


@pytest.mark.parametrize("per_bag", [1, 3])
@pytest.mark.parametrize("order", [2, 3])
def test_tables_of_different_ranks_share_a_lookup(order: int, per_bag: int) -> None:
    row_shapes, ranks = [(5, 4, 2), (7, 3, 3), (2, 2, 2), (1, 9, 1)], [(3, 2), (9, 5), (0, 1), (20, 7)]
    tables = [make_tables([m[:order]], (4, 4, 2)[:order], r[: order - 1])[0] for m, r in zip(row_shapes, ranks, strict=True)]
    check(tables, lookups(tables, 9), torch.arange(0, 37, per_bag), features=4 if per_bag == 1 else 2)
