"""The two data sets of the quality benchmark, in memory.

R rows, F categorical fields, I integer columns.

    synth   `comera synth` and `comera preprocess`: Criteo's format, a planted signal, chronological splits.
    ml1m    implicit feedback in a folder with train.txt and test.txt, a line a user: the user's id, then the items'. A tenth of the
            training pairs, drawn at random, are for validation. Each positive pair gets one negative: the same user with an item
            drawn uniformly from those that the user never had in any split (as in He et al., Neural Collaborative Filtering,
            arXiv 1708.05031). Negatives of the training rows are drawn anew for each epoch.

Ids are ordered by frequency in training, 0 the most frequent, as `comera preprocess` does it.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comera_rec.training.batches import ParquetBatches
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth


@dataclass(frozen=True, kw_only=True)
class Rows:
    """ids [R, F] int64, dense [R, I], labels [R]."""

    ids: Tensor
    dense: Tensor
    labels: Tensor

    def take(self, index: Tensor) -> Rows:
        """Some rows."""
        return Rows(ids=self.ids[index], dense=self.dense[index], labels=self.labels[index])


class DataSet(ABC):
    """Rows of three splits, the size and the frequencies of each field.

    Attributes:
        name: "synth" or "ml1m".
        counts: per field [num_embeddings], how often each id occurs in training.
        val, test: rows.
    """

    name: str
    counts: list[Tensor]
    val: Rows
    test: Rows

    @abstractmethod
    def training_rows(self, generator: torch.Generator) -> Rows:
        """The rows of one epoch, shuffled."""

    def batches(self, batch: int, steps: int, seed: int) -> Iterator[Rows]:
        """So many training batches, the same for a seed."""
        generator = torch.Generator().manual_seed(seed)
        rows, first = self.training_rows(generator), 0
        for _ in range(steps):
            if first + batch > len(rows.labels):
                rows, first = self.training_rows(generator), 0
            yield rows.take(torch.arange(first, first + batch))
            first += batch


class Synth(DataSet):
    """Criteo-format logs with a planted signal."""

    name = "synth"

    def __init__(self, rows: int, scale: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log, data = Path(folder) / "train.txt", Path(folder) / "data"
            synth(SynthOptions(rows=rows, output=log, seed=1, scale=scale))
            preprocess(PreprocessOptions(inputs=(log,), output=data))
            sizes = [column.num_embeddings for column in read_manifest(data).categorical_columns]
            train, self.val, self.test = (_read_split(data, split) for split in ("train", "val", "test"))
        self._train = train
        self.counts = [torch.bincount(train.ids[:, f], minlength=size) for f, size in enumerate(sizes)]

    def training_rows(self, generator: torch.Generator) -> Rows:
        """See the base class."""
        return self._train.take(torch.randperm(len(self._train.labels), generator=generator))


def _read_split(data: Path, split: str) -> Rows:
    batches = list(ParquetBatches(str(data), split, batch_size=65_536))
    ids = [batch.sparse.values().view(len(batch.sparse.keys()), -1).T for batch in batches]
    return Rows(
        ids=torch.cat(ids).long(),
        dense=torch.cat([batch.dense for batch in batches]),
        labels=torch.cat([batch.labels for batch in batches]),
    )


class ImplicitFeedback(DataSet):
    """User-item pairs from a folder, with drawn negatives."""

    name = "ml1m"

    def __init__(self, folder: Path) -> None:
        for name in ("train.txt", "test.txt"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no {name}: give a folder with train.txt and test.txt, a line of ids a user")
        train, test = _read_pairs(folder / "train.txt"), _read_pairs(folder / "test.txt")
        sizes = np.maximum(train.max(0), test.max(0)) + 1
        for field in (0, 1):  # ids by falling frequency
            order = np.argsort(-np.bincount(train[:, field], minlength=sizes[field]), kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            train[:, field], test[:, field] = place[train[:, field]], place[test[:, field]]
        self._known = torch.zeros(tuple(sizes), dtype=torch.bool)
        for pairs in (train, test):
            self._known[pairs[:, 0], pairs[:, 1]] = True
        shuffled = np.random.default_rng(0).permutation(train)
        held_out = len(shuffled) // 10
        self._train = torch.from_numpy(shuffled[held_out:])
        self.counts = [torch.bincount(self._train[:, field], minlength=int(sizes[field])) for field in (0, 1)]
        generator = torch.Generator().manual_seed(0)
        self.val = self._with_negatives(torch.from_numpy(shuffled[:held_out]), generator)
        self.test = self._with_negatives(torch.from_numpy(test), generator)

    def training_rows(self, generator: torch.Generator) -> Rows:
        """See the base class."""
        rows = self._with_negatives(self._train, generator)
        return rows.take(torch.randperm(len(rows.labels), generator=generator))

    def _with_negatives(self, pairs: Tensor, generator: torch.Generator) -> Rows:
        items = torch.randint(self._known.shape[1], (len(pairs),), generator=generator)
        while (known := self._known[pairs[:, 0], items].nonzero().flatten()).numel():
            items[known] = torch.randint(self._known.shape[1], (len(known),), generator=generator)
        negatives = torch.stack([pairs[:, 0], items], dim=1)
        labels = torch.cat([torch.ones(len(pairs)), torch.zeros(len(pairs))])
        return Rows(ids=torch.cat([pairs, negatives]), dense=torch.empty(len(labels), 0), labels=labels)


def _read_pairs(path: Path) -> np.ndarray:
    """[pairs, 2] of (user, item)."""
    lines = [np.array(line.split(), dtype=np.int64) for line in path.read_text().splitlines()]
    return np.concatenate([np.stack([np.full(len(line) - 1, line[0]), line[1:]], axis=1) for line in lines if len(line) > 1])
