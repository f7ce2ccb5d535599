"""Positions for ids that a data set of one's own has numbered: ids that occur together become neighbors."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from data_pipeline.cooccurrence import cooccurrence_vectors
from data_pipeline.errors import UserError
from data_pipeline.similarity import similarity_order as order_of_vectors

_MOST = np.iinfo(np.int32).max


class SimilarityOrder(NamedTuple):
    """An order of a feature's M ids.

    Attributes:
        positions: of each id, int64 [M], a permutation.
        vectors: of the ids in order of their positions, float32 [M, K]: values for a dense table to start from.
    """

    positions: Tensor
    vectors: Tensor


def similarity_order(batches: Iterable[KeyedJaggedTensor], num_embeddings: Mapping[str, int]) -> dict[str, SimilarityOrder]:
    """Return an order of similarity of each feature's ids.

    A TT table describes ids better if those with similar meaning share slices, so look up `order[feature].positions[ids]` in place
    of `ids`, in training and serving alike. A table learns more from few samples if it starts from the vectors: copy them into a
    dense table, and compress the model with `init="tt_svd"`.

    Ids are similar if they occur with the same ids in samples (`data_pipeline.cooccurrence`). Positions of the most frequent ids
    come first, as hot rows need it: within bands, 0 to 255, 256 to 4,095 and so on, order is by similarity. `comera preprocess
    --order similarity` numbers values so from the start, which spares this table of positions.

    Args:
        batches: of training samples alone; about a million samples are enough. 8 bytes are kept for each id of them.
        num_embeddings: by feature, the number of ids. Features that it doesn't name are ignored.

    Raises:
        ValueError: a batch lacks a feature, or has an id that is out of range; more than 2^31 - 1 ids.

    Returns:
        By feature, its positions and vectors.

    >>> pairs = torch.randint(50, (1000,))  # user u reads items u and u + 50
    >>> batch = KeyedJaggedTensor.from_lengths_sync(
    ...     ["user", "item"], torch.cat([pairs, pairs + 50 * torch.randint(2, (1000,))]), torch.ones(2000, dtype=torch.long))
    >>> order = similarity_order([batch], {"user": 50, "item": 100})
    >>> order["item"].positions.sort().values.equal(torch.arange(100)), order["item"].vectors.shape
    (True, torch.Size([100, 32]))
    """
    if not num_embeddings:
        raise UserError("num_embeddings is empty: give the number of ids of each feature")
    sizes = np.array(list(num_embeddings.values()), np.int64)
    if sizes.sum() > _MOST:
        raise UserError(f"the features have {sizes.sum():,} ids together: name fewer, with at most {_MOST:,}")
    firsts = np.cumsum(sizes) - sizes
    numbers, lengths = [], []
    for batch in batches:
        if batch.variable_stride_per_key():
            raise UserError("a batch has other numbers of samples for some features: give batches without inverse indices")
        samples = batch.stride()
        sample_of, number_of = [], []
        for (feature, size), first in zip(num_embeddings.items(), firsts, strict=True):
            if feature not in batch.keys():  # noqa: SIM118
                raise UserError(
                    f"a batch has no feature {feature!r}, only {', '.join(batch.keys())}: name those that all batches have"
                )
            ids = batch[feature].values().numpy(force=True)
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                wrong = ids[(ids < 0) | (ids >= size)][0]
                raise UserError(f"feature {feature!r} has id {wrong}, but num_embeddings is {size}: ids run from 0 to {size - 1}")
            sample_of.append(np.repeat(np.arange(samples), batch[feature].lengths().numpy(force=True)))
            number_of.append((ids + first).astype(np.int32))
        order = np.argsort(np.concatenate(sample_of), kind="stable")
        numbers.append(np.concatenate(number_of)[order])
        lengths.append(np.bincount(np.concatenate(sample_of), minlength=samples))
    values = np.concatenate([np.empty(0, np.int32), *numbers])
    if len(values) > _MOST:
        raise UserError(f"the batches have {len(values):,} ids of these features: give at most {_MOST:,}; fewer are enough")
    ends = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int32)
    vectors, counts = cooccurrence_vectors(values, ends, int(sizes.sum())), np.bincount(values, minlength=sizes.sum())
    orders = {}
    for (feature, size), first in zip(num_embeddings.items(), firsts, strict=True):
        frequent = np.argsort(-counts[first : first + size], kind="stable")
        order = frequent[order_of_vectors(vectors[first + frequent])]
        positions = torch.empty(size, dtype=torch.long).index_put_((torch.from_numpy(order),), torch.arange(size))
        orders[feature] = SimilarityOrder(positions, torch.from_numpy(vectors[first + order, :-1]))
    return orders
