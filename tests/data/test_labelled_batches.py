"""Batches with several labels and with weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from comera_rec.data import ParquetBatches
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import read_schema

ROWS = 200


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    rows = zip(draw.integers(0, 2, ROWS), draw.integers(0, 2, ROWS), draw.integers(1, 9, ROWS) / 8, range(ROWS), strict=True)
    (tmp_path / "log.csv").write_text("".join(f"{click},{buy},{weight},{number}\n" for click, buy, weight, number in rows))
    columns = 'click = "label"\nbuy = "label"\nimportance = "weight"\nnumber = { kind = "integer", transform = "none" }'
    (tmp_path / "schema.toml").write_text(f'separator = ","\n[columns]\n{columns}')
    schema = read_schema(tmp_path / "schema.toml")
    preprocess(PreprocessOptions(inputs=(tmp_path / "log.csv",), output=tmp_path / "data", schema=schema, part_bytes=500))
    return tmp_path / "data"


@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_and_weights_stay_with_their_rows(data: Path, shuffle: bool) -> None:
    log = np.loadtxt(data.parent / "log.csv", delimiter=",")
    batches = list(ParquetBatches(data, "train", batch_size=64, shuffle=shuffle, shuffle_rows=50))
    assert [tuple(batch.labels.shape) for batch in batches] == [(64, 2), (64, 2), (32, 2)]
    assert [len(batch) for batch in batches] == [64, 64, 32]
    rows = torch.cat([batch.dense[:, 0] for batch in batches]).long()
    assert (rows.sort().values == torch.arange(160)).all()
    assert (rows == torch.arange(160)).all() != shuffle
    weights = torch.cat([batch.weights for batch in batches if batch.weights is not None])
    np.testing.assert_array_equal(torch.cat([batch.labels for batch in batches]), log[rows, :2])
    np.testing.assert_array_equal(weights, log[rows, 2].astype(np.float32))


def test_padded_rows_have_zero_weight(data: Path) -> None:
    batch = next(iter(ParquetBatches(data, "val", batch_size=20)))
    padded = batch.padded(24).to("cpu")
    assert (padded.labels.shape, len(padded)) == ((24, 2), 24)
    assert padded.weights is not None
    assert padded.weights[20:].tolist() == [0, 0, 0, 0]
    assert torch.equal(padded.weights[:20], batch.weights if batch.weights is not None else torch.empty(0))
    assert torch.equal(padded.labels[:20], batch.labels)
    assert not padded.labels[20:].any()
    assert torch.equal(padded.dense, torch.cat([batch.dense, torch.zeros(4, 1)]))
