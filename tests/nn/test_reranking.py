"""Hot rows follow frequent ids; all other ids keep their values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import comera_rec as cr
from comera_rec.nn import TTEmbedding, rerank_hot_rows_

ROWS, HOT = 600, ((20, 8), (40, 3))


def trained(row_order: torch.Tensor | None = None) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"pages": TTEmbedding(ROWS, 8, tt_ranks=3, hot_rows=HOT, row_order=row_order)})
    for block in model["pages"].hot_blocks():
        nn.init.normal_(block.core_0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model["pages"](torch.arange(ROWS)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("ordered", [False, True])
def test_frequent_ids_get_hot_rows_and_other_ids_keep_their_values(ordered: bool) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)) if ordered else None
    model, optimizer = trained(order)
    table = model["pages"]
    row_of = torch.arange(ROWS) if order is None else order
    id_of = row_of.argsort()
    before = table.dense_matrix()
    states = [optimizer.state[block.core_0]["exp_avg"] for block in table.hot_blocks()]
    counts = 100 * (ROWS - row_of)  # as hot rows are now
    wide, narrow, cold = id_of[400], id_of[401], id_of[[5, 30]]
    counts[wide], counts[narrow], counts[cold] = 10**6, int(counts[id_of[50]]), 0
    assert rerank_hot_rows_(model, optimizer, {"pages": counts}) == {"pages": 2}
    rows = table.row_order
    assert rows is not None
    assert rows[wide] < 20 <= rows[narrow] < 60
    assert all(rows[cold] >= 60)
    after = table.dense_matrix()
    torch.testing.assert_close(after[wide], before[wide])  # a block as wide as the table fits them exactly
    moved = rows != row_of
    assert moved.sum() == 4
    assert torch.equal(after[~moved], before[~moved])
    for block, state in zip(table.hot_blocks(), states, strict=True):
        zero = (state == 0).all(dim=(0, 2, 3)).nonzero().flatten() + block.first
        assert zero.tolist() == sorted(row for row in rows[moved].tolist() if block.first <= row < block.first + block.num_rows)


def test_differences_by_chance_move_nothing() -> None:
    model, optimizer = trained()
    counts = torch.poisson(torch.full((ROWS,), 20.0), torch.Generator().manual_seed(0))
    assert rerank_hot_rows_(model, optimizer, {"pages": counts})["pages"] <= 5


def test_mistakes_are_named() -> None:
    model, _ = trained()
    with pytest.raises(ValueError, match=r"'users' names 0 TT tables with hot rows, not one: the model has \['pages'\]"):
        rerank_hot_rows_(model, None, {"users": torch.zeros(ROWS)})
    both = nn.ModuleDict({"a": model, "b": copy.deepcopy(model)})
    with pytest.raises(ValueError, match="'pages' names 2 TT tables"):
        rerank_hot_rows_(both, None, {"pages": torch.zeros(ROWS)})
    others = torch.optim.Adam(nn.Linear(2, 2).parameters())
    counts = torch.zeros(ROWS).index_fill(0, torch.tensor([ROWS - 1]), 100)
    assert rerank_hot_rows_(both, others, {"b.pages": counts}) == {"b.pages": 1}
    assert not others.state_dict()["state"]
    with pytest.raises(ValueError, match=r"frequencies of 'pages' have shape \(5,\): give 600 counts"):
        rerank_hot_rows_(model, None, {"pages": torch.zeros(5)})


def test_tables_of_collections_go_by_name() -> None:
    config = cr.TTEmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"], tt_ranks=2, hot_rows=HOT)
    model = nn.Sequential(cr.TTEmbeddingBagCollection([config]))
    counts = torch.zeros(ROWS).index_fill(0, torch.tensor([ROWS - 1]), 100)
    assert rerank_hot_rows_(model, None, {"t": counts}) == {"t": 1}
