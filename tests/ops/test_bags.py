"""Bags of rows of TT tables agree with torch's embedding_bag over the dense tables: values and every gradient."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bag_tables import LAYOUTS, TOLERANCE, check, differentiate, every_impl, every_order, make_tables, plan_of, pool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag
from comera_rec.nn import update_in_backward_
from comera_rec.ops import tt_bags
from comera_rec.ops.bags import HotBlock, Table
from comera_rec.tt import TTShape


def numbers(lowest: int, highest: int, count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(lowest, highest), min_size=count, max_size=count)


@st.composite
def columns(draw: st.DrawFn, order: int) -> list[int]:
    """Draw column modes: small ones of every order, two of specialized kernels, or one or two large ones, as of real models."""
    kind = draw(st.sampled_from(["small", "specialized", "large"]))
    if kind == "small":
        return draw(numbers(1, 5, order))
    if kind == "specialized":
        sizes = [draw(st.sampled_from([4, 8, 16])) for _ in range(2)]
    else:
        real = [48, 68, 96, 128, 132, 192, 200, 300, 1040]
        sizes = [draw(st.one_of(st.integers(1, 300), st.sampled_from(real))), draw(st.integers(1, 31))]
    return draw(st.permutations([*sizes, 1, 1][:order]))


@st.composite
def blocks_of(draw: st.DrawFn, rows: int) -> list[tuple[int, int]]:
    """Draw hot blocks with at most the table's rows."""
    blocks = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), max_size=3))
    ends = [sum(count for count, _ in blocks[: k + 1]) for k in range(len(blocks))]
    return [block for block, end in zip(blocks, ends, strict=True) if end <= rows]


@settings(max_examples=300)
@given(data=st.data())
def test_any_bags(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    order, features = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row_shapes = [draw(numbers(1, 4, order)) for _ in range(draw(st.integers(1, 3)))]
    col_shape, ranks = draw(columns(order)), [draw(numbers(0, draw(st.sampled_from([5, 20])), order - 1)) for _ in row_shapes]
    width = TTShape(tuple(row_shapes[0]), tuple(col_shape), tuple(ranks[0])).num_cols
    impl = draw(st.sampled_from(["auto", "auto", "reference"]))
    dtype = torch.float32 if impl == "reference" or order == 1 else draw(st.sampled_from(list(TOLERANCE)))
    num_cols = draw(st.sampled_from([width, max(1, width - 1), -(-width // 2)]))
    hot_rows = [draw(blocks_of(math.prod(row_shape))) for row_shape in row_shapes]
    tables = make_tables(row_shapes, col_shape, ranks, num_cols, dtype, hot_rows)
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
    size = (len(offsets) - 1) // features, features * tables[0].embedding_dim
    grad = lay(torch.randn(size)) if draw(st.booleans()) else torch.ones(1).expand(size)
    check(tables, ids, offsets.to(index), impl=impl, grad=grad, **arguments)


def lookups(tables: Sequence[TTEmbeddingBag], count: int) -> list[Tensor]:
    return [(torch.rand(count) ** 3 * table.num_embeddings).long() for table in tables]


@pytest.mark.parametrize(
    ("row_shapes", "col_shape", "ranks", "dtype"),
    [
        ([(200, 300), (50, 40), (3, 2000), (1, 1)], (4, 4), (8,), torch.float32),
        ([(20, 15, 200), (5, 4, 30), (40, 50, 7)], (2, 4, 8), (5, 8), torch.float32),
        ([(3, 2, 70, 50), (10, 6, 5, 4)], (2, 4, 2, 4), (3, 8, 5), torch.float16),
    ],
    ids=str,
)
def test_batches_of_several_tasks(row_shapes: list[tuple], col_shape: tuple, ranks: tuple, dtype: torch.dtype) -> None:
    """Tens of tasks forward and several stripes of rows backward; for four cores, thousands of right products."""
    # Rows of several tasks in a block, and of several blocks in a task.
    hot_rows = [((5, 16), (1000, 3), (200, 4)), (), ((3, 2),) * 20, ((1, 1),)][: len(row_shapes)]
    tables = make_tables(row_shapes, col_shape, ranks, dtype=dtype, hot_rows=hot_rows)
    features = len(tables)
    ids = [(torch.rand(9000) ** 1.5 * table.num_embeddings).long() for table in tables]
    count = 9000 * features
    jagged = torch.cat([torch.tensor([0]), torch.randint(count + 1, (3000 * features,)).sort().values])
    # Memory is reused: leftovers of earlier calls must not be read.
    nans = make_tables(row_shapes, col_shape, ranks, dtype=dtype)
    for parameter in (parameter for table in nans for parameter in table.parameters()):
        nn.init.constant_(parameter, torch.nan)
    for offsets in (torch.arange(count + 1), jagged):
        differentiate(pool, nans, ids, offsets, features=features)
    check(tables, ids, torch.arange(count + 1), is_large=True, features=features)
    check(tables, ids, jagged, is_large=True, features=features, mode="mean")
    check(tables, ids, jagged, is_large=True, features=features, per_sample_weights=torch.rand(count))


def test_tables_too_large_to_be_differentiated_at_once() -> None:
    """Gradient sums of the three tables take some 90 MB."""
    tables = make_tables([(10, 40_000), (30, 3), (3, 40_000)], (4, 8), (8,))
    ids = [torch.randint(table.num_embeddings, (12_000,)) for table in tables]
    check(tables, ids, torch.arange(36_001), is_large=True, features=3)


@every_order
def test_cores_in_any_layout(order: int) -> None:
    """Cores whose slices aren't contiguous are copied, and still have gradients."""
    (table,) = make_tables([(5, 4, 2, 3)[:order]], (2, 3, 2, 2)[:order], (3, 2, 4)[: order - 1], hot_rows=[((10, 3),)])
    ids, offsets = torch.randint(table.num_embeddings, (9,)), torch.tensor([0, 4, 4, 9])
    expected = differentiate(pool, [table], [ids], offsets)
    cores, diagonals, (block,), _ = table.forward_parameters()
    for lay in LAYOUTS:
        copies = [[lay(tensor.detach()).requires_grad_() for tensor in group] for group in (cores, diagonals, block)]
        laid_out = Table(copies[0], copies[1], [HotBlock(*copies[2])])
        out = tt_bags([laid_out], plan_of([table], [ids]), offsets, num_cols=table.embedding_dim)
        inputs = [tensor for group in copies for tensor in group]
        actual = torch.autograd.grad(out, inputs, torch.linspace(-1, 2, out.numel()).view_as(out))
        torch.testing.assert_close([out.detach(), *actual], expected, rtol=0, atol=0)


@every_impl
@every_order
def test_without_diagonals_they_are_ones(order: int, impl: str) -> None:
    tables = make_tables([(5, 4, 2, 3)[:order], (2, 3, 3, 1)[:order]], (2, 3, 2, 2)[:order], (3, 2, 4)[: order - 1])
    for parameter in (parameter for table in tables for parameter in table.rank_parameters()):
        nn.init.ones_(parameter)
    cores, ids, offsets = [table.cores() for table in tables], lookups(tables, 9), torch.tensor([0, 4, 4, 18])
    inputs = [core for table_cores in cores for core in table_cores]
    results = []
    for diagonals in ([table.rank_parameters() for table in tables], [[], []]):
        pairs = list(zip(cores, diagonals, strict=True))
        out = tt_bags(pairs, plan_of(tables, ids, impl), offsets, num_cols=tables[0].embedding_dim, impl=impl)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results)


@every_impl
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_in_no_bag_have_no_gradient(mode: str, impl: str) -> None:
    tables = make_tables([(5, 4)], (2, 3), (3,))
    ids, grad = [torch.tensor([7, 1, 19, 1, 12])], torch.tensor([[torch.inf], [1.0]]).expand(2, 6)
    _, core, *_ = differentiate(pool, tables, ids, torch.tensor([0, 1, 2]), impl=impl, mode=mode, grad=grad)
    assert core[:, 2:].eq(0).all(), "ids beyond the bags have leading digits from 3 on, and get none of the first bag's gradient"


@pytest.mark.parametrize(("mode", "weighted", "per_bag"), [("sum", False, 1), ("sum", True, 3), ("mean", False, 3)])
@every_order
def test_results_do_not_depend_on_threads(order: int, mode: str, per_bag: int, weighted: bool, on_threads: Callable) -> None:
    row_shapes = [(30, 20, 10, 9)[:order], (5, 4, 3, 3)[:order], (7, 70, 7, 70)[:order]]
    tables = make_tables(row_shapes, (4, 4, 4, 1)[:order], (8, 8, 3)[: order - 1])
    ids = lookups(tables, 9000)
    arguments = {"per_sample_weights": torch.randn(27_000)} if weighted else {}
    run = lambda: differentiate(pool, tables, ids, torch.arange(0, 27_001, per_bag), features=3, mode=mode, **arguments)  # noqa: E731
    one, two, again = (on_threads(count, run) for count in (1, 2, 2))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(one, two, again, strict=True))


def test_threads_share_a_large_lookup(on_threads: Callable) -> None:
    tables = make_tables([(200, 300), (100, 100)], (16, 16), (32,))
    ids, offsets = lookups(tables, 20_000), torch.arange(40_001)
    plan = plan_of(tables, ids)

    def threads_used() -> int:
        pool(tables, ids, offsets, plan=plan)
        return torch.ops.comera_rec.threads_used_last()

    assert on_threads(1, threads_used) == 1
    # If others keep a core busy, the second thread may start too late to get a task.
    assert any(on_threads(2, threads_used) == 2 for _ in range(50))


@every_impl
@every_order
def test_a_graph_can_be_reused(order: int, impl: str) -> None:
    tables = make_tables([(4, 3, 2, 2)[:order], (5, 2, 2, 3)[:order]], (2, 3, 2, 1)[:order], (3, 2, 3)[: order - 1])
    out = pool(tables, lookups(tables, 10), torch.arange(0, 21, 2), impl=impl)
    parameters = [parameter for table in tables for parameter in table.parameters()]
    one, two = (torch.autograd.grad(out.square().sum(), parameters, retain_graph=True) for _ in range(2))
    together = torch.autograd.grad(out.square().sum() + out.square().sum(), parameters)
    assert all(map(torch.equal, one, two))
    torch.testing.assert_close(together, tuple(2 * gradient for gradient in one))


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("loss", [torch.sum, torch.norm])  # the first has a constant gradient
def test_a_second_derivative_is_refused(updated: bool, loss: Callable) -> None:
    (table,) = make_tables([(5, 4)], (2, 3), (3,))
    if updated:
        update_in_backward_(table, torch.optim.SGD(list(table.cores()), lr=0.1))
    out = pool([table], [torch.tensor([3, 7])], torch.tensor([0, 2]))
    (gradient,) = torch.autograd.grad(loss(out), table.rank_1 if updated else table.core_0, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentia|derivative"):
        gradient.square().sum().backward()
