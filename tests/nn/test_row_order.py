"""A row order changes which row an id has, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import comera_rec as cr
from comera_rec.nn import TTEmbedding
from comera_rec.serving.lookups import FastTables, PortableTables
from comera_rec.serving.tables import served_table

ROWS, DIM = 60, 12


def pair(kind: type, hot: bool = False, **options: object) -> tuple[cr.TTEmbeddingBag, cr.TTEmbeddingBag, Tensor]:
    """A table, one of the same values with a row order, and the order."""
    order = torch.randperm(ROWS)
    plain = kind(ROWS, DIM, hot_rows=((10, 3), (20, 2)) if hot else (), **options)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    ordered = copy.deepcopy(plain)
    ordered.set_row_order_(order)
    return plain, ordered, order


@given(hot=st.booleans(), order=st.sampled_from([2, 3]), dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 99))
def test_lookups_and_gradients_are_those_of_the_rows(hot: bool, order: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    plain, ordered, rows = pair(cr.TTEmbeddingBag, hot, shape=cr.TTShape.for_table(ROWS, DIM, tt_ranks=3, order=order))
    ids, offsets = torch.randint(ROWS, (31,), dtype=dtype), torch.tensor([0, 4, 4, 20])
    expected, bags = plain(rows[ids.long()], offsets), ordered(ids, offsets)
    torch.testing.assert_close(bags, expected)
    for one, other in zip(plain.parameters(), ordered.parameters(), strict=True):
        gradients = torch.autograd.grad(expected.square().sum(), one, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(bags.square().sum(), other, retain_graph=True), gradients)
    torch.testing.assert_close(ordered.dense_matrix(), plain.dense_matrix()[rows])
    torch.testing.assert_close(ordered.to_dense()(ids.long(), offsets), bags)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("tokens", [1, 500])
def test_logits_are_by_id(hot: bool, tokens: int) -> None:
    _, ordered, _ = pair(TTEmbedding, hot, padding_idx=5)
    x = torch.randn(tokens, DIM)
    expected = x @ ordered.dense_matrix().mT
    expected[:, 5] = 0
    torch.testing.assert_close(ordered.logits(x), expected)


def test_a_state_dict_brings_its_order(tmp_path) -> None:
    _, ordered, rows = pair(cr.TTEmbeddingBag)
    fresh = cr.TTEmbeddingBag(ROWS, DIM, tt_ranks=4)
    fresh.load_state_dict(ordered.state_dict())
    torch.testing.assert_close(fresh.dense_matrix(), ordered.dense_matrix())
    with pytest.raises(RuntimeError, match="row_order"):
        ordered.load_state_dict(cr.TTEmbeddingBag(ROWS, DIM, tt_ranks=4).state_dict())
    matrix = torch.randn(ROWS, DIM)
    full = cr.TTEmbeddingBag(ROWS, DIM, tt_ranks=60, row_order=rows)
    full.set_dense_matrix_(matrix)
    torch.testing.assert_close(full.dense_matrix(), matrix, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", [PortableTables, FastTables])
def test_served_tables_follow_it(form: type) -> None:
    plain, ordered, _ = pair(cr.TTEmbeddingBag, True, include_last_offset=True)
    tables = form([served_table(plain), served_table(ordered)], torch.float32)
    ids = torch.randint(ROWS, (16,))
    bags = tables(ids, torch.tensor([3, 5, 2, 6]))
    torch.testing.assert_close(bags[:, 0], plain(ids[:8], torch.tensor([0, 3, 8])))
    torch.testing.assert_close(bags[:, 1], ordered(ids[8:], torch.tensor([0, 2, 8])))
