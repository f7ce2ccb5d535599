"""Positions of one's own ids: a permutation in which ids that occur together are neighbors, the most frequent ones first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torchrec import KeyedJaggedTensor

import comera_rec as cr

GROUPS, IDS = 8, 400


def grouped_batches(count: int = 8, samples: int = 1000) -> list[KeyedJaggedTensor]:
    """Samples with a user and up to three items of one group; id i belongs to group i % GROUPS."""
    batches = []
    for _ in range(count):
        group = torch.randint(GROUPS, (samples,))
        lengths = torch.randint(0, 4, (samples,))
        groups = torch.cat([group, group.repeat_interleave(lengths)])
        ids = groups + GROUPS * torch.randint(IDS // GROUPS, groups.shape)
        batches.append(KeyedJaggedTensor(["user", "item"], ids, lengths=torch.cat([torch.ones_like(lengths), lengths])))
    return batches


def test_ids_of_a_group_get_neighboring_positions() -> None:
    orders = cr.similarity_order(grouped_batches(), {"user": IDS, "item": IDS + 10})
    for feature, size in (("user", IDS), ("item", IDS + 10)):
        assert orders[feature].positions.sort().values.equal(torch.arange(size))
        vectors = F.normalize(orders[feature].vectors[orders[feature].positions[:IDS]])
        similar = (vectors @ vectors.mT).view(IDS // GROUPS, GROUPS, IDS // GROUPS, GROUPS).mean(dim=(0, 2))
        assert similar.diag().min() > similar.fill_diagonal_(-1).max()
        ids = orders[feature].positions.argsort()[:256]
        assert (ids % GROUPS == ids.roll(1) % GROUPS)[1:].float().mean() > 0.85


def test_frequent_ids_come_first() -> None:
    ids = torch.cat([torch.arange(600), torch.arange(256).repeat(9)])
    batch = KeyedJaggedTensor(["id", "other"], torch.cat([ids, ids % 7]), lengths=torch.ones(2 * len(ids), dtype=torch.long))
    assert cr.similarity_order([batch], {"id": 600})["id"].positions[:256].max() < 256


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"user": 10}, r"feature 'user' has id \d+, but num_embeddings is 10: ids run from 0 to 9"),
        (
            {"user": 1 << 30, "item": 1 << 30},
            "the features have 2,147,483,648 ids together: name fewer, with at most 2,147,483,647",
        ),
        ({"price": 10}, "a batch has no feature 'price', only user, item"),
    ],
)
def test_mistakes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cr.similarity_order(grouped_batches(1), sizes)
