"""Mistakes with modules, and in their settings, are errors that say what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comera_rec import LinearCompression, TTEmbeddingBag, TTLinear, TTShape
from comera_rec.nn import MultiheadAttention, TransformerConfig, TransformerEncoder


def look_up(*ids: int, bag: TTEmbeddingBag | None = None, weights: Tensor | None = None) -> Tensor:
    """Look up one bag, by default in a table whose last rows are padding."""
    bag = bag or TTEmbeddingBag(101, 11, shape=TTShape((7, 5, 3), (3, 2, 2), (4, 5)), name="table 'C3'", dtype=torch.float64)
    return bag(torch.tensor(ids), torch.tensor([0]), weights)


def ordered(order: Tensor) -> TTEmbeddingBag:
    return TTEmbeddingBag(60, 12, row_order=order, name="table 'x'")


SMALL = TransformerConfig(vocab_size=90, embed_dim=16, num_layers=1, num_heads=4, ff_dim=24, max_length=10)
NO_TT_LINEAR = "is not that of a TT linear layer: give input modes first"
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: TTEmbeddingBag(0, 16), "num_embeddings is 0: give a positive integer"),
    (lambda: TTEmbeddingBag(100, 16, mode="median"), "mode is 'median': choose one of 'sum', 'mean', 'max'"),
    (lambda: TTEmbeddingBag(100, 16, impl="fast"), "impl is 'fast': choose 'auto'"),
    (lambda: TTEmbeddingBag(100, 16, shape=TTShape((9, 10), (4, 4), 2)), "shape spans 90 x 16, less than 100 x 16"),
    (lambda: TTEmbeddingBag(100, 16, shape=TTShape((10, 10), (4, 4), 2), tt_ranks=2), "are both given: give one of them"),
    (lambda: TTEmbeddingBag(32, 1, shape=TTShape((2,) * 5, (1,) * 5, 2)), "has 5 cores: embedding tables take at most 4"),
    (lambda: TTEmbeddingBag.from_dense(nn.EmbeddingBag(10, 4, padding_idx=0)), "can't leave padding_idx out of bags: build the Em"),
    (lambda: TTEmbeddingBag.from_dense(nn.EmbeddingBag(10, 4, scale_grad_by_freq=True)), "scale_grad_by_freq have no equivalent"),
    (lambda: look_up(0, 101), "id 101 is out of range for table 'C3': its ids run from 0 to 100"),
    (lambda: look_up(-1, 0), "id -1 is out of range for table 'C3': its ids run from 0 to 100"),
    (lambda: look_up(2**33), f"id {2**33} is out of range for table 'C3': its ids run from 0 to 100"),
    (lambda: look_up(1, 60, bag=ordered(torch.randperm(60))), "id 60 is out of range for table 'x'"),
    (lambda: look_up(0, 1, 2, weights=torch.ones(3, 1)), r"per_sample_weights has shape \(3, 1\) for ids of shape \(3,\): give"),
    (lambda: ordered(torch.arange(60) + 1), "give each of the numbers 0 to 59 once"),
    (lambda: ordered(torch.zeros(60, dtype=torch.long)), "give each of the numbers 0 to 59 once"),
    (lambda: ordered(torch.arange(60).float()), "give each of the numbers 0 to 59 once"),
    (lambda: TTLinear(0, 8), "in_features is 0: give a positive integer"),
    (lambda: TTLinear(16, 8, shape=TTShape((4, 4), (4, 4), 2)), NO_TT_LINEAR),
    (lambda: TTLinear(16, 8, shape=TTShape((15, 1), (1, 8), 2)), "shape spans 15 x 8, less than 16 x 8: enlarge its modes"),
    (lambda: TTLinear(15, 21)(torch.randn(2, 14)), "input has 14 features and the layer takes 15"),
    (lambda: LinearCompression(compression=1.0), "compression is 1.0: give a number above 1"),
    (lambda: LinearCompression(batch=0), "batch is 0: give a positive integer"),
    (lambda: LinearCompression(policy="never"), "policy is 'never': choose 'auto' or 'always'"),
    (lambda: MultiheadAttention(16, 3), "num_heads is 3, which does not divide embed_dim 16: choose one of its divisors"),
    (lambda: MultiheadAttention(16, 0), "num_heads is 0: give a positive integer"),
    (lambda: TransformerConfig(num_layers=0), "num_layers is 0: give a positive integer"),
    (lambda: TransformerConfig(dropout=1.0), "dropout is 1.0: give a probability from 0 to below 1"),
    (
        lambda: TransformerEncoder(SMALL)(torch.zeros(1, 11).long()),
        "ids have 11 positions but max_length is 10: truncate the ids or",
    ),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[str(k) for k in range(len(MISTAKES))])
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
