"""TTEmbedding agrees with nn.Embedding over the dense matrix, and its logits with x E^T: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comera_rec import TTEmbedding, TTEmbeddingBag, TTLinear, TTShape

# Table sizes, modes and ranks: orders 1 to 4, primes whose last rows and columns are padding, rank 1. Some shapes make `logits`
# start from the left, others from the right.
SHAPES = [
    (35, 6, TTShape((35,), (6,), ())),
    (31, 7, TTShape((7, 5), (4, 2), (1,))),
    (101, 11, TTShape((7, 5, 3), (3, 2, 2), (4, 5))),
    (97, 16, TTShape((4, 3, 3, 3), (2, 2, 2, 2), (2, 3, 2))),
    (60, 24, TTShape((3, 20), (12, 2), 4)),
    (60, 24, TTShape((20, 3), (2, 12), 4)),
]
every_shape = pytest.mark.parametrize("size", SHAPES, ids=lambda size: "x".join(map(str, size[2].row_shape)))


def build(size: tuple[int, int, TTShape], dtype: torch.dtype = torch.float64) -> TTEmbedding:
    embedding = TTEmbedding(size[0], size[1], shape=size[2], dtype=dtype)
    with torch.no_grad():
        for rank in embedding.rank_parameters():
            rank.uniform_(0.5, 1.5)
    return embedding


def assert_same(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))


@given(data=st.data())
def test_rows_and_scores_are_those_of_the_dense_matrix(data: st.DataObject) -> None:
    draw, order = data.draw, data.draw(st.integers(1, 4))
    modes = st.lists(st.integers(1, 5), min_size=order, max_size=order)
    ranks = st.lists(st.integers(1, 4), min_size=order - 1, max_size=order - 1)
    shape = TTShape(draw(modes), draw(modes), draw(ranks))
    size = draw(st.integers(1, shape.num_rows)), draw(st.integers(1, shape.num_cols)), shape
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    embedding = build(size)
    dense, ids = embedding.dense_matrix(), torch.randint(size[0], leading)
    assert_same(embedding(ids), F.embedding(ids, dense), list(embedding.parameters()))
    torch.testing.assert_close(embedding(ids), embedding.to_dense()(ids))
    torch.testing.assert_close(embedding.float()(ids).double(), F.embedding(ids, dense), rtol=1e-4, atol=1e-4)
    x = torch.randn(*leading, size[1], dtype=torch.float64, requires_grad=True)
    assert_same(embedding.double().logits(x), x @ embedding.dense_matrix().mT, [x, *embedding.parameters()])


@pytest.mark.parametrize("size", [(101, 11, SHAPES[2][2]), (60, 24, SHAPES[4][2])], ids=str)
def test_padding_has_no_score_in_either_form(size: tuple[int, int, TTShape]) -> None:
    embedding = TTEmbedding(size[0], size[1], shape=size[2], padding_idx=3, dtype=torch.float64)
    x = torch.randn(2, size[1], dtype=torch.float64)
    scores = embedding.logits(x)
    assert not scores[:, 3].any()
    torch.testing.assert_close(scores, x @ embedding.to_dense().weight.mT)


def flops_of_logits(embedding: TTEmbedding, tokens: int) -> int:
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        embedding.logits(torch.zeros(tokens, embedding.embedding_dim))
    return int(flops.get_total_flops())


def test_scores_take_few_operations_and_a_small_table_is_formed_for_many_tokens() -> None:
    small = TTEmbedding(4000, 256, shape=TTShape((16, 16, 16), (4, 8, 8), 48))
    formed, path = 2 * 4096 * 256, 2 * 4 * 48 * 256 * (64 + 16)  # for each token
    assert flops_of_logits(small, 11) - flops_of_logits(small, 10) == path
    assert flops_of_logits(small, 101) - flops_of_logits(small, 100) <= formed < path
    x = torch.randn(100, 256)
    torch.testing.assert_close(small.logits(x)[:1], small.logits(x[:1]), rtol=1e-4, atol=1e-4)
    # x (16 x 48) by the right part (48 x 32*100), then the left part (320 x 16*32) by that (16*32 x 100)
    large = TTEmbedding(32_000, 768, shape=TTShape((16, 20, 10, 10), (4, 4, 8, 6), 32))
    assert flops_of_logits(large, 301) - flops_of_logits(large, 300) == 2 * (16 * 48 * 32 * 100 + 320 * 16 * 32 * 100)


def test_scores_are_exported_for_any_number_of_tokens() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = TTEmbedding(300, 64, tt_ranks=16)

        def forward(self, x: Tensor) -> Tensor:
            return self.embedding.logits(x)

    model = Scores()
    exported = torch.export.export(model, (torch.randn(9, 64),), dynamic_shapes=({0: torch.export.Dim("tokens")},), strict=False)
    for tokens in (2, 5000):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-4, atol=1e-3)


def test_exported_lookups_take_arguments_in_any_layout() -> None:
    bag = TTEmbeddingBag(300, 32, tt_ranks=8, include_last_offset=True)
    batch = torch.randint(300, (12,)), torch.tensor([0, 4, 12]), torch.rand(12)
    for module, arguments in ((TTEmbedding(300, 32, tt_ranks=8), [torch.randint(300, (4, 6))]), (bag, batch)):
        exported = torch.export.export(module, tuple(arguments), strict=False).module()
        strided = [torch.stack([argument, argument], dim=1)[:, 0] for argument in arguments]
        torch.testing.assert_close(exported(*strided), module(*arguments))


def test_dense_forms_are_frozen_where_layers_are() -> None:
    layers = TTEmbedding(300, 32, tt_ranks=8), TTEmbeddingBag(300, 32, tt_ranks=8), TTLinear(64, 64, tt_ranks=8)
    for layer in layers:
        assert all(parameter.requires_grad for parameter in layer.to_dense().parameters())
        assert not any(parameter.requires_grad for parameter in layer.requires_grad_(False).to_dense().parameters())


def test_a_vanished_table_is_zero() -> None:
    embedding = build(SHAPES[2])
    embedding.resize_ranks_((0, 0))
    assert torch.equal(embedding(torch.tensor([[3, 100]])), torch.zeros(1, 2, 11, dtype=torch.float64))
    assert torch.equal(embedding.logits(torch.ones(2, 11, dtype=torch.float64)), torch.zeros(2, 101, dtype=torch.float64))
