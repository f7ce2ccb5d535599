"""Hot rows, which may follow frequent ids, and row orders: what they change in a table, and nothing else; ranks change in both."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_backward import RowWiseAdagrad, _apply_optimizer_in_backward
from refusals import refuse
from torch import Tensor, nn

import comera_rec as cr
from comera_rec import TTEmbedding, TTEmbeddingBag, TTShape
from comera_rec.nn import TTModule, rerank_hot_rows_, update_in_backward_
from comera_rec.rank import keep_ranks_
from comera_rec.tt import blocks_params, choose_hot_blocks

BLOCKS = ((4, 3), (20, 2))
ROWS, HOT = 600, ((20, 8), (40, 3))
ORDERED_ROWS, DIM = 60, 12


def build(**arguments: object) -> TTEmbeddingBag:
    """Build a table of 100 x 12 with hot rows that don't start at zero."""
    table = TTEmbeddingBag(100, 12, tt_ranks=4, hot_rows=iter(BLOCKS), **arguments)  # type: ignore[arg-type]
    for block in table.hot_blocks():
        nn.init.normal_(block.core_0)
        nn.init.uniform_(block.rank_1, 0.5, 1.5)
    return table


def test_they_are_added_to_the_first_rows() -> None:
    table = build()
    with_rows, without_rows, (one, other) = table.dense_matrix(), TTModule.dense_matrix(table), table.hot_blocks()
    assert (one.first, other.first, table.num_hot_rows) == (0, 4, 24)
    block_rows = other.core_0[0, :, 0] * other.rank_1[:, 0] @ other.core_1[:, 0, :, 0]
    torch.testing.assert_close(with_rows[4:24] - without_rows[4:24], block_rows, rtol=0, atol=1e-5)
    assert torch.equal(with_rows[24:], without_rows[24:])


def test_hot_rows_start_at_zero_and_learn_from_the_first_step() -> None:
    table = TTEmbeddingBag(100, 12, tt_ranks=4, hot_rows=BLOCKS)
    assert not table.hot_matrix().any()
    table(torch.arange(100)[:, None]).square().sum().backward()
    assert all(block.core_0.grad.abs().amax(dim=3).min() > 0 for block in table.hot_blocks())


def test_truncation_narrows_blocks_and_their_optimizer_state() -> None:
    table = build()
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    update_in_backward_(table, optimizer)
    ids = torch.arange(100)[:, None]
    table(ids).square().sum().backward()
    one, other = table.hot_blocks()
    sums = optimizer.state[other.core_0]["sum"].clone()
    expected = other.dense_matrix() - torch.outer(other.core_0[0, :, 0, 0], other.core_1[0, 0, :, 0]) * other.rank_1[0]
    keep_ranks_([one, other], [[torch.zeros(3, dtype=torch.bool)], [torch.tensor([False, True])]], optimizer)
    assert (one.shape.ranks, other.shape.ranks) == ((0,), (1,))
    torch.testing.assert_close(other.dense_matrix(), expected, rtol=0, atol=1e-5)
    assert torch.equal(optimizer.state[other.core_0]["sum"], sums[..., 1:])
    before = other.core_0.detach().clone()
    table(ids).square().sum().backward()  # also with a block without columns
    assert not torch.equal(other.core_0, before)
    torch.testing.assert_close(table(ids), table.dense_matrix(), rtol=0, atol=1e-5)


def test_a_block_without_columns_has_no_state() -> None:
    """Row-wise sums are means over a row's numbers, and such a block's rows have none."""
    table = build()
    cores = [core for module in (table, *table.hot_blocks()) for core in module.cores()]
    _apply_optimizer_in_backward(RowWiseAdagrad, cores, {"lr": 0.1})  # type: ignore[arg-type]
    one, other = table.hot_blocks()
    keep_ranks_([one, other], [[torch.zeros(3, dtype=torch.bool)], [torch.ones(2, dtype=torch.bool)]])
    table(torch.arange(100)[:, None]).square().sum().backward()
    (optimizer,) = one.core_0._in_backward_optimizers  # type: ignore[attr-defined]
    assert not any(value.isnan().any() for value in optimizer.state[one.core_0].values())


def test_pickling_a_table_drops_its_optimizer() -> None:
    table = build()
    update_in_backward_(table, torch.optim.Adagrad(table.parameters(), lr=0.1))
    again = pickle.loads(pickle.dumps(table))
    again(torch.arange(100)[:, None]).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())
    assert len(pickle.dumps(table)) < 2 * len(pickle.dumps(build()))


def test_a_state_dict_of_other_widths_is_loaded_and_one_without_hot_rows_refused() -> None:
    table, other = build(), TTEmbeddingBag(100, 12, tt_ranks=2, hot_rows=((4, 1), (20, 6)))
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.dense_matrix(), table.dense_matrix())
    assert [block.shape.ranks for block in other.hot_blocks()] == [(3,), (2,)]
    with pytest.raises(RuntimeError, match=r"hot_rows\.0\.core_0"):
        table.load_state_dict(TTEmbeddingBag(100, 12, tt_ranks=4).state_dict())


@pytest.mark.parametrize("budget", [0, 100, 5_000, 80_000, 200_000, 10**7])
def test_blocks_fill_their_budget_with_as_many_rows_in_all_tables(budget: int) -> None:
    sizes = [100_000, 3000, 50]
    actual = choose_hot_blocks(sizes, 16, budget)
    params = sum(blocks_params(blocks, 16) for blocks in actual)
    full = sum(blocks_params(blocks, 16) for blocks in choose_hot_blocks(sizes, 16, 1e12))
    assert 0.99 * min(budget, full) <= params <= budget
    counts = [sum(rows for rows, _ in blocks) for blocks in actual]
    assert counts == [min(max(counts), rows) for rows in sizes]
    widths = [width for _, width in actual[0]]
    assert widths == sorted(widths, reverse=True)
    assert choose_hot_blocks([], 16, budget) == []


def test_blocks_that_do_not_fit_are_refused() -> None:
    sizes = {"name": "t", "num_embeddings": 100, "embedding_dim": 12}
    for blocks, message in (
        (((50, 2), (51, 1)), "have more rows than the table's 100: give fewer"),
        (((0, 2),), "rows_of_a_hot_block is 0"),
        (((5, 0),), "width_of_a_hot_block is 0"),
    ):
        refuse(message, TTEmbeddingBag, 100, 12, hot_rows=blocks)
        refuse(f"table 't': .*{message}", cr.TTEmbeddingBagConfig, tt_ranks=2, hot_rows=blocks, **sizes)
    refuse("which a dense table can't have: give tt_ranks or shape", cr.TTEmbeddingBagConfig, hot_rows=BLOCKS, **sizes)


def trained(row_order: Tensor | None = None, kind: Any = torch.optim.Adam) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"pages": TTEmbedding(ROWS, 8, tt_ranks=3, hot_rows=HOT, row_order=row_order)})
    for block in model["pages"].hot_blocks():
        nn.init.normal_(block.core_0)
    optimizer = kind(model.parameters(), lr=0.01)
    if kind is RowWiseAdagrad:
        update_in_backward_(model, optimizer)
    model["pages"](torch.arange(ROWS)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("kind", "key"), [(torch.optim.Adam, "exp_avg"), (RowWiseAdagrad, "sum")])
def test_frequent_ids_get_hot_rows_and_other_ids_keep_their_values(ordered: bool, kind: Any, key: str) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)) if ordered else None
    model, optimizer = trained(order, kind)
    table = model["pages"]
    row_of = torch.arange(ROWS) if order is None else order
    id_of, before = row_of.argsort(), table.dense_matrix()
    states = [optimizer.state[block.core_0][key] for block in table.hot_blocks()]
    counts = 100 * (ROWS - row_of)  # as hot rows are now
    wide, narrow, cold = id_of[400], id_of[401], id_of[[5, 30]]
    counts[wide], counts[narrow], counts[cold] = 10**6, int(counts[id_of[50]]), 0
    assert rerank_hot_rows_(model, optimizer, {"pages": counts}) == {"pages": 2}
    rows, after = table.row_order, table.dense_matrix()
    assert rows[wide] < 20 <= rows[narrow] < 60 <= rows[cold].min()
    torch.testing.assert_close(after[wide], before[wide])  # a block as wide as the table fits them exactly
    moved = rows != row_of
    assert moved.sum() == 4
    assert torch.equal(after[~moved], before[~moved])
    for block, state in zip(table.hot_blocks(), states, strict=True):
        zero = (state.view(block.num_rows, -1) == 0).all(dim=1).nonzero().flatten() + block.first
        assert zero.tolist() == sorted(row for row in rows[moved].tolist() if block.first <= row < block.first + block.num_rows)


def test_differences_by_chance_move_nothing() -> None:
    model, optimizer = trained()
    counts = torch.poisson(torch.full((ROWS,), 20.0), torch.Generator().manual_seed(0))
    assert rerank_hot_rows_(model, optimizer, {"pages": counts})["pages"] <= 5


def test_tables_go_by_name_and_mistakes_are_named() -> None:
    model, _ = trained()
    both = nn.ModuleDict({"a": model, "b": copy.deepcopy(model)})
    counts = torch.zeros(ROWS).index_fill(0, torch.tensor(599), 100)
    refuse("'users' names 0 TT tables with hot rows, not one: the model has", rerank_hot_rows_, model, None, {"users": counts})
    refuse("'pages' names 2 TT tables", rerank_hot_rows_, both, None, {"pages": counts})
    others = torch.optim.Adam(nn.Linear(2, 2).parameters())
    assert rerank_hot_rows_(both, others, {"b.pages": counts}) == {"b.pages": 1}
    assert not others.state_dict()["state"]
    settings: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": 8, "feature_names": ["f"], "tt_ranks": 2, "hot_rows": HOT}
    collection = cr.TTEmbeddingBagCollection([cr.TTEmbeddingBagConfig(name="t", **settings)])
    assert rerank_hot_rows_(nn.Sequential(collection), None, {"t": counts}) == {"t": 1}, "tables of collections go by name"
    refuse(r"frequencies of 'pages' have shape \(5,\): give 600 counts", rerank_hot_rows_, model, None, {"pages": torch.zeros(5)})


def pair(hot: bool = False, order: int = 2) -> tuple[TTEmbeddingBag, TTEmbeddingBag, Tensor]:
    """A table, one of the same values with a row order, and the order."""
    rows = torch.randperm(ORDERED_ROWS)
    shape = TTShape.for_table(ORDERED_ROWS, DIM, tt_ranks=3, order=order)
    plain = TTEmbeddingBag(ORDERED_ROWS, DIM, hot_rows=((10, 3), (20, 2)) if hot else (), shape=shape)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    ordered = copy.deepcopy(plain)
    ordered.set_row_order_(rows)
    return plain, ordered, rows


@given(hot=st.booleans(), order=st.sampled_from([2, 3]), dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 99))
def test_lookups_and_gradients_are_those_of_the_rows(hot: bool, order: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    plain, ordered, rows = pair(hot, order)
    ids, offsets = torch.randint(ORDERED_ROWS, (31,), dtype=dtype), torch.tensor([0, 4, 4, 20])
    expected, bags = plain(rows[ids.long()], offsets), ordered(ids, offsets)
    torch.testing.assert_close(bags, expected)
    gradients = torch.autograd.grad(expected.square().sum(), [*plain.parameters()])
    torch.testing.assert_close(torch.autograd.grad(bags.square().sum(), [*ordered.parameters()]), gradients)
    torch.testing.assert_close(ordered.dense_matrix(), plain.dense_matrix()[rows])
    torch.testing.assert_close(ordered.to_dense()(ids.long(), offsets), bags)


def test_row_orders_load_with_the_cores_or_not_at_all() -> None:
    _, ordered, _ = pair()
    fresh, stored = TTEmbeddingBag(ORDERED_ROWS, DIM, tt_ranks=4), ordered.state_dict()
    with pytest.raises(RuntimeError, match="loads all of its tensors or none"):
        fresh.load_state_dict({name: value for name, value in stored.items() if name != "core_1"}, strict=False)
    assert fresh.row_order is None
    before = {name: value.clone() for name, value in stored.items()}
    with pytest.raises(RuntimeError, match="the state dict lacks row_order"):
        ordered.load_state_dict(fresh.state_dict(), strict=False)
    torch.testing.assert_close(dict(ordered.state_dict()), before)
    fresh.load_state_dict(stored)
    torch.testing.assert_close(fresh.dense_matrix(), ordered.dense_matrix())


def test_a_matrix_is_set_by_id() -> None:
    matrix = torch.randn(ORDERED_ROWS, DIM)
    full = TTEmbeddingBag(ORDERED_ROWS, DIM, tt_ranks=60, row_order=torch.randperm(ORDERED_ROWS))
    full.set_dense_matrix_(matrix)
    torch.testing.assert_close(full.dense_matrix(), matrix, atol=1e-4, rtol=1e-4)
