"""Positions for ids that a data set of one's own has numbered: ids that occur together become neighbors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from data_pipeline.similarity import cooccurrence_vectors
from data_pipeline.similarity import similarity_order as order_of_vectors


def similarity_order(batches: Iterable[KeyedJaggedTensor], num_embeddings: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the position of each id of each feature in an order of similarity.

    A TT table describes ids better if those with similar meaning share slices, so look up `positions[feature][ids]` in place of
    `ids`, in training and serving alike. Ids are similar if they occur with the same ids in samples (`data_pipeline.similarity`).
    Positions of the most frequent ids come first, as hot rows need it: within bands, 0 to 63, 64 to 1,023 and so on, order is by
    similarity. `comera preprocess --order similarity` numbers values so from the start, which spares this table of positions.

    Args:
        batches: of training samples alone; about a million samples are enough. 8 bytes are kept for each id of them.
        num_embeddings: by feature, the number of ids. Features that it doesn't name are ignored.

    Raises:
        ValueError: a batch lacks a feature, or has an id that is out of range.

    Returns:
        By feature, int64 [num_embeddings]: a permutation.

    >>> pairs = torch.randint(50, (1000,))  # user u reads items u and u + 50
    >>> batch = KeyedJaggedTensor.from_lengths_sync(
    ...     ["user", "item"], torch.cat([pairs, pairs + 50 * torch.randint(2, (1000,))]), torch.ones(2000, dtype=torch.long))
    >>> positions = similarity_order([batch], {"user": 50, "item": 100})
    >>> positions["item"].sort().values.equal(torch.arange(100))
    True
    """
    sizes = np.array(list(num_embeddings.values()), np.int64)
    firsts = np.cumsum(sizes) - sizes
    numbers, lengths = [], []
    for batch in batches:
        samples = batch.stride()
        sample_of, number_of = [], []
        for (feature, size), first in zip(num_embeddings.items(), firsts, strict=True):
            if feature not in batch.keys():  # noqa: SIM118
                raise ValueError(
                    f"a batch has no feature {feature!r}, only {', '.join(batch.keys())}: name those that all batches have"
                )
            ids = batch[feature].values().numpy(force=True)
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                wrong = ids[(ids < 0) | (ids >= size)][0]
                raise ValueError(f"feature {feature!r} has id {wrong}, but num_embeddings is {size}: ids run from 0 to {size - 1}")
            sample_of.append(np.repeat(np.arange(samples), batch[feature].lengths().numpy(force=True)))
            number_of.append((ids + first).astype(np.int32))
        order = np.argsort(np.concatenate(sample_of), kind="stable")
        numbers.append(np.concatenate(number_of)[order])
        lengths.append(np.bincount(np.concatenate(sample_of), minlength=samples))
    values = np.concatenate([np.empty(0, np.int32), *numbers])
    ends = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int32)
    vectors, counts = cooccurrence_vectors(values, ends, int(sizes.sum())), np.bincount(values, minlength=sizes.sum())
    positions = {}
    for (feature, size), first in zip(num_embeddings.items(), firsts, strict=True):
        frequent = np.argsort(-counts[first : first + size], kind="stable")
        order = frequent[order_of_vectors(vectors[first + frequent], math.isqrt(size) + 1)]
        positions[feature] = torch.empty(size, dtype=torch.long).index_put_((torch.from_numpy(order),), torch.arange(size))
    return positions
