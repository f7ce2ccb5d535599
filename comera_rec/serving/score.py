"""Scores of a log, or of a split of a data set, in one Parquet file (`data_pipeline.apply`).

Columns of the file: `line` or `row`; `score`, the probability of label 1, float32, or `score_LABEL` for each of several labels; the
labels themselves if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from comera_rec.serving.package import ServingModel, read_metadata
from comera_rec.serving.vocabularies import check_vocabularies, open_vocabularies, run_of
from data_pipeline.apply import ApplyOptions, apply
from data_pipeline.atomic import refuse_overlap
from data_pipeline.encoder import Flat
from data_pipeline.manifest import file_sha256, read_manifest


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ApplyOptions):
    """Options of scoring.

    Args:
        model: MODEL.pt2.
        data: folder of the data set whose vocabularies encode a log; None takes the one that the model was trained on.
    """

    model: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap(self.output, "model", [self.model])


def score(options: ScoreOptions, tell: Callable[[str], None] = lambda line: None) -> int:
    """Write the scores of a log or a split, and return their number; after an interruption, the same call resumes.

    Args:
        options: what to score, and where to write it.
        tell: called with each message.

    Raises:
        ValueError: if the model or the input is invalid, or they don't fit each other.
        OSError: if the output can't be written.
    """
    metadata = read_metadata(options.model)
    if options.folder:
        check_vocabularies(metadata, read_manifest(options.folder), options.folder)
    else:
        open_vocabularies(metadata, options.data)
        options = replace(options, data=options.data or Path(run_of(metadata).data))
    identity = {"model": file_sha256(options.model)}
    return apply(partial(_scores, options.model), options, identity=identity, preload=__name__, tell=tell)


@cache
def _load(model: Path) -> ServingModel:
    return ServingModel(model, threads=1)


def _scores(path: Path, batches: Iterable[Flat]) -> dict[str, np.ndarray]:
    """Return the columns of scores: `score`, or `score_LABEL` for each of several labels."""
    model = _load(path)
    with torch.inference_mode():
        scores = [model(*map(torch.from_numpy, batch))[0].numpy() for batch in batches]
    labels = run_of(model.metadata).labels
    names = [f"score_{label}" for label in labels] if len(labels) > 1 else ["score"]
    columns = [np.empty((len(labels), 0), np.float32), *(each.reshape(-1, len(labels)).T for each in scores)]
    return dict(zip(names, np.concatenate(columns, axis=1), strict=True))
