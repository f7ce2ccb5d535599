"""torch's own embedding layers become TT tables that behave like the layers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import comera_rec as cr

CONFIG = cr.TableCompression(tt_ranks=100, min_rows=100)


class Model(nn.Module):
    """A model with a layer of each kind, and some that stay dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(400, 16, padding_idx=7)
        self.clicks = nn.EmbeddingBag(300, 8, mode="mean", include_last_offset=True)
        self.few = nn.Embedding(99, 16)
        self.tied = nn.Embedding(200, 16)
        self.output = nn.Linear(16, 200, bias=False)
        self.output.weight = self.tied.weight
        self.limited = nn.Embedding(200, 16, max_norm=1.0)
        self.bags_of_padded = nn.EmbeddingBag(200, 16, padding_idx=0)
        nn.init.normal_(self.few.weight, std=0.1)


def test_layers_that_do_not_share_their_weight_are_swapped(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, tokens = Model(), torch.tensor([[3, 7, 399], [7, 0, 3]])
    words, clicks = model.words(tokens), model.clicks(torch.tensor([5, 299, 5]), torch.tensor([0, 2, 2, 3]))
    model.clicks.weight.requires_grad_(False)
    with caplog.at_level(logging.INFO):
        assert cr.compress_(model.eval(), tables=CONFIG, init="tt_svd") is model
    assert [name for name, module in model.named_modules() if isinstance(module, cr.TTEmbedding | cr.TTEmbeddingBag)] == [
        "words",
        "clicks",
    ]
    assert not model.words.training
    torch.testing.assert_close(model.words(tokens), words, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.clicks(torch.tensor([5, 299, 5]), torch.tensor([0, 2, 2, 3])), clicks, rtol=1e-4, atol=1e-4)
    assert [p.requires_grad for p in model.clicks.parameters()] == [False] * 3
    for reason in (
        "tied: 200 x 16, stays dense: its weight is also that of 'output'",
        "limited: 200 x 16, stays dense: max_norm",
        "bags_of_padded: 200 x 16, stays dense: a TT table can't leave padding_idx out of bags",
    ):
        assert reason in caplog.text
    with pytest.raises(ValueError, match="id 400 is out of range for words"):
        model.words(torch.tensor([400]))


def test_the_padding_row_is_zero_and_learns_nothing() -> None:
    model = nn.Sequential(nn.Embedding(400, 16, padding_idx=7))
    torch.manual_seed(0)
    [table] = cr.compress_(model, tables=CONFIG)
    rows = model(torch.tensor([7, 8]))
    assert rows[0].eq(0).all()
    assert rows[1].ne(0).all()
    model(torch.tensor([7])).sum().backward()
    assert all(core.grad is None or core.grad.eq(0).all() for core in table.cores())
    dense = cr.export_dense(model)[0]
    assert dense.padding_idx == 7
    torch.testing.assert_close(dense(torch.tensor([7, 8, 0])), model(torch.tensor([7, 8, 0])))
    with pytest.raises(ValueError, match="padding_idx is 400: give an id from 0 to 399"):
        cr.TTEmbedding(400, 16, padding_idx=400)
    used = nn.Embedding(400, 16, padding_idx=7)
    nn.init.ones_(used.weight)
    with pytest.raises(ValueError, match="the row of padding_idx 7 isn't zero, and TT tables need a zero row"):
        cr.TTEmbedding.from_dense(used, tt_ranks=4)


def test_random_tables_have_the_spread_of_the_layers() -> None:
    model = nn.Sequential(nn.Embedding(5000, 32))
    nn.init.normal_(model[0].weight, std=0.02)
    assert cr.compress_(model, tables=CONFIG)[0].dense_matrix().std().item() == pytest.approx(0.02, rel=0.3)
    with torch.device("meta"):
        unmade = nn.Sequential(nn.Embedding(5000, 32))
    assert cr.compress_(unmade, tables=CONFIG)[0].core_0.is_meta
