"""The data sets of the quality benchmark, in memory.

R rows, F categorical fields, I integer columns.

    synth   `comera synth` and `comera preprocess`: Criteo's format, a planted signal, chronological splits. In synth-even, effects
            of rare values are as large as those of frequent ones; in synth-steep, they shrink twice as fast as in synth; in
            synth-groups, values that occur together have effects in common; synth-groups-10M has ten times as many rows.
    ml1m    implicit feedback in a folder with train.txt and test.txt, one line per user: the user's id, then the items' ids. A
            random tenth of the training pairs is for validation. Each positive pair gets one negative: the same user with an item
            drawn uniformly from those that the user never had, in training for training rows and in any split for the others (as in
            He et al., Neural Collaborative Filtering, arXiv 1708.05031). Negatives of training rows are redrawn for each epoch.
    others  implicit feedback in a file, one line "user item" per interaction, each user's in chronological order: a user's last
            interaction is for testing and the one before it for validation, if there are at least three; negatives as above.

Ids are ordered by frequency in the training split, 0 being the most frequent, or by similarity, both as `comera preprocess` orders
them (in synthetic logs, 0 is missing).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera_rec.data import ParquetBatches
from data_pipeline.cooccurrence import cooccurrence_vectors
from data_pipeline.manifest import Order, read_manifest
from data_pipeline.planted import DECAY
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.similarity import similarity_order
from data_pipeline.synth import SynthOptions, synth

LOGS: dict[str, dict[str, Any]] = {
    "synth": {"decay": DECAY},
    "synth-even": {"decay": 0.0},
    "synth-steep": {"decay": 2 * DECAY},
    "synth-groups": {"groups": 0.5},
    "synth-groups-10M": {"groups": 0.5},
}
"""What distinguishes the synthetic logs."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """ids [R, F] int64, dense [R, I], labels [R]."""

    ids: Tensor
    dense: Tensor
    labels: Tensor

    def take(self, index: Tensor) -> Rows:
        """Select rows by index."""
        return Rows(ids=self.ids[index], dense=self.dense[index], labels=self.labels[index])


class DataSet:
    """The rows of three splits, and the frequencies of each field's ids.

    Attributes:
        name: "synth", or the name of a file or folder.
        counts: for each field [num_embeddings], how often each id occurs in training.
        vectors: for each field [num_embeddings, K], what its ids occur with; empty if they are in order of frequency.
        train, val, test: rows of these splits; implicit feedback has no `train`, because negatives are redrawn.
    """

    name: str
    counts: list[Tensor]
    vectors: Sequence[Tensor] = ()
    train: Rows
    val: Rows
    test: Rows

    def training_rows(self, generator: torch.Generator) -> Rows:
        """The rows of one epoch, shuffled."""
        return self.train.take(torch.randperm(len(self.train.labels), generator=generator))

    def unlabeled_ids(self, rows: Rows) -> Tensor:
        """Return ids [R', F] that belong together as those of training rows do, which a trained model can label."""
        return rows.ids[:0]

    def batches(self, batch: int, steps: int, seed: int) -> Iterator[Rows]:
        """Yield `steps` training batches, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        rows, first = self.training_rows(generator), 0
        for _ in range(steps):
            if first + batch > len(rows.labels):
                rows, first = self.training_rows(generator), 0
            yield rows.take(torch.arange(first, first + batch))
            first += batch


class Synth(DataSet):
    """Criteo-format logs with a planted signal, whose effects shrink with a value's frequency rank as `DECAYS` says."""

    def __init__(self, name: str, rows: int, scale: float, order: Order = "frequency") -> None:
        self.name = name
        with tempfile.TemporaryDirectory() as folder:
            log, data = Path(folder) / "train.txt", Path(folder) / "data"
            synth(SynthOptions(rows=rows, output=log, seed=1, scale=scale, **LOGS[name]))
            preprocess(PreprocessOptions(inputs=(log,), output=data, order=order))
            columns = read_manifest(data).categorical_columns
            kept = [np.load(data / column.vectors.path)[:, :-1].astype(np.float32) for column in columns if column.vectors]
            self.vectors = [torch.from_numpy(np.pad(vectors, ((1, 0), (0, 0)))) for vectors in kept]
            self.train, self.val, self.test = (_read_split(data, split) for split in ("train", "val", "test"))
        self.counts = [torch.bincount(self.train.ids[:, f], minlength=each.num_embeddings) for f, each in enumerate(columns)]


def _read_split(data: Path, split: str) -> Rows:
    batches = list(ParquetBatches(str(data), split, batch_size=65_536))
    ids = torch.cat([batch.sparse.values().view(len(batch.sparse.keys()), -1).T for batch in batches]).long()
    dense, labels = torch.cat([batch.dense for batch in batches]), torch.cat([batch.labels for batch in batches])
    return Rows(ids=ids, dense=dense, labels=labels)


class ImplicitFeedback(DataSet):
    """User-item pairs with randomly drawn negatives.

    Args:
        name: name of the data set.
        train, val, test: (user, item) pairs [pairs, 2].
        order: of ids.
        seed: of the order.
    """

    def __init__(
        self, name: str, train: np.ndarray, val: np.ndarray, test: np.ndarray, order: Order = "frequency", seed: int = 0
    ) -> None:
        self.name = name
        pairs = np.concatenate([train, val, test])
        sizes = pairs.max(0) + 1
        for field in (0, 1):  # number ids by descending frequency in training
            frequent = np.argsort(-np.bincount(train[:, field], minlength=sizes[field]), kind="stable")
            _renumber(frequent, field, train, val, test)
        if order == "similarity":
            values = (train + np.array([0, sizes[0]])).astype(np.int32).ravel()
            vectors = cooccurrence_vectors(values, np.arange(0, len(values) + 1, 2, dtype=np.int32), int(sizes.sum()), seed)
            for field, of_field in enumerate(np.split(vectors, sizes[:1])):
                _renumber(similar := similarity_order(of_field), field, train, val, test)
                self.vectors = [*self.vectors, torch.from_numpy(of_field[similar, :-1])]
        self._items = int(sizes[1])
        keys = [torch.from_numpy(split @ np.array([self._items, 1])) for split in (train, val, test)]
        self._known_in_training, self._known = keys[0].unique(), torch.cat(keys).unique()
        self._train = torch.from_numpy(train)
        self.counts = [torch.bincount(self._train[:, field], minlength=int(sizes[field])) for field in (0, 1)]
        generator = torch.Generator().manual_seed(0)
        self.val, self.test = (self._with_negatives(torch.from_numpy(split), self._known, generator) for split in (val, test))

    @classmethod
    def read(cls, path: Path, order: Order = "frequency", seed: int = 0) -> ImplicitFeedback:
        """Read a folder with train.txt and test.txt, or a file of interactions; see the module's docstring."""
        if path.is_file():
            return cls(path.stem, *_split_in_time(np.loadtxt(path, dtype=np.int64, ndmin=2)), order, seed)
        shuffled = np.random.default_rng(0).permutation(_read_pairs(path / "train.txt"))
        held_out = len(shuffled) // 10
        return cls(path.name, shuffled[held_out:], shuffled[:held_out], _read_pairs(path / "test.txt"), order, seed)

    def training_rows(self, generator: torch.Generator) -> Rows:
        rows = self._with_negatives(self._train, self._known_in_training, generator)
        return rows.take(torch.randperm(len(rows.labels), generator=generator))

    def unlabeled_ids(self, rows: Rows) -> Tensor:
        """Return the rows' users, each with a random item."""
        return torch.stack([rows.ids[:, 0], torch.randint(self._items, (len(rows.ids),))], dim=1)

    def _with_negatives(self, pairs: Tensor, known: Tensor, generator: torch.Generator) -> Rows:
        """Return the pairs, and as many negatives that are not among the known pairs [pairs], sorted numbers."""
        items = torch.randint(self._items, (len(pairs),), generator=generator)
        while (wrong := self._is_known(pairs[:, 0], items, known).nonzero().flatten()).numel():
            items[wrong] = torch.randint(self._items, (len(wrong),), generator=generator)
        negatives = torch.stack([pairs[:, 0], items], dim=1)
        labels = torch.cat([torch.ones(len(pairs)), torch.zeros(len(pairs))])
        return Rows(ids=torch.cat([pairs, negatives]), dense=torch.empty(len(labels), 0), labels=labels)

    def _is_known(self, users: Tensor, items: Tensor, known: Tensor) -> Tensor:
        keys = users * self._items + items
        return known[torch.searchsorted(known, keys).clamp_max(len(known) - 1)] == keys


def _renumber(order: np.ndarray, field: int, *splits: np.ndarray) -> None:
    """Give the ids of a field, listed in their new order, the numbers from 0 on."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    for split in splits:
        split[:, field] = place[split[:, field]]


def _split_in_time(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split into training, validation and test pairs; ids become contiguous, and each user's interactions keep their order."""
    pairs = np.stack([np.unique(pairs[:, field], return_inverse=True)[1] for field in (0, 1)], axis=1)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    counts = np.bincount(pairs[:, 0])[pairs[:, 0]]
    from_last = np.cumsum(np.bincount(pairs[:, 0]))[pairs[:, 0]] - 1 - np.arange(len(pairs))
    is_test, is_val = (counts >= 3) & (from_last == 0), (counts >= 3) & (from_last == 1)
    return pairs[~is_test & ~is_val], pairs[is_val], pairs[is_test]


def _read_pairs(path: Path) -> np.ndarray:
    """Read (user, item) pairs [pairs, 2]."""
    lines = [np.array(line.split(), dtype=np.int64) for line in path.read_text().splitlines()]
    return np.concatenate([np.stack([np.full(len(line) - 1, line[0]), line[1:]], axis=1) for line in lines if len(line) > 1])
