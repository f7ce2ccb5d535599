"""Plans made ahead of time, as a pipelined trainer makes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torchrec import KeyedJaggedTensor

import comera_rec as cr


def test_plans_made_ahead_in_another_thread_give_the_same_bags() -> None:
    tables = [
        cr.TTEmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, tt_ranks=rank)
        for name, rows, dim, features, rank in [
            ("a", 500, 8, ["f0", "f1"], 3),
            ("b", 900, 8, ["f2"], 3),
            ("c", 700, 4, ["f3"], 2),
            ("dense", 50, 4, ["f4"], None),
        ]
    ]
    collection = cr.TTEmbeddingBagCollection(tables)
    batches = [
        KeyedJaggedTensor(
            keys=[f"f{k}" for k in range(5)], values=torch.randint(50, (200,)), lengths=torch.full((5 * 20,), 2, dtype=torch.int64)
        )
        for _ in range(4)
    ]
    expected = [collection(batch).values() for batch in batches]
    with ThreadPoolExecutor(1) as executor:
        for k, batch in enumerate(batches):
            ahead = executor.submit(collection.plan, batches[(k + 1) % 4])
            plans = executor.submit(collection.plan, batch).result()
            assert set(plans) == {("a", "b"), ("c",)}
            torch.testing.assert_close(collection(batch, plans).values(), expected[k], rtol=0, atol=0)
            following = collection(batches[(k + 1) % 4], ahead.result()).values()
            torch.testing.assert_close(following, expected[(k + 1) % 4], rtol=0, atol=0)
