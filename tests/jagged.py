"""Random jagged batches."""

from collections.abc import Mapping

import torch
from torchrec import KeyedJaggedTensor


def random_jagged(
    features: Mapping[str, int], batch: int, *, weighted: bool = False, longest: int = 4, seed: int = 0
) -> KeyedJaggedTensor:
    """Bags of 0 to `longest` ids below each feature's limit, with repeats; every table's first and last id occur."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for limit in features.values():
        lengths.append(torch.randint(0, longest + 1, (batch,), generator=generator))
        ids = torch.randint(0, limit, (int(lengths[-1].sum()),), generator=generator)
        ids[:1] = 0
        ids[-2:] = limit - 1
        values.append(ids)
    flat = torch.cat(values)
    weights = torch.rand(len(flat), generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys=list(features), values=flat, lengths=torch.cat(lengths), weights=weights)
