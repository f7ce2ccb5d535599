"""Synthetic logs: Criteo's format, one log per seed, and a truth file with the true probabilities."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import refuse

from data_pipeline import synth as synth_module
from data_pipeline.planted import DRAWS, MISSING_RATES, PlantedModel
from data_pipeline.synth import SynthOptions, synth


def exact_auc(label: np.ndarray, score: np.ndarray) -> float:
    ranks = pd.Series(score).rank().to_numpy()
    positives = label.sum()
    return float((ranks[label == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(label) - positives)))


def test_log_and_truth(tmp_path: Path) -> None:
    truth = synth(SynthOptions(rows=30_000, output=tmp_path / "raw" / "train.txt", scale=0.05, seed=3))
    log = pd.read_csv(tmp_path / "raw" / "train.txt", sep="\t", header=None, dtype=str)
    assert log.shape == (30_000, 40)

    drawn = PlantedModel(seed=3, scale=0.05).rows(np.random.default_rng([3, 0]).random((30_000, DRAWS)))
    label = log[0].astype(int).to_numpy()
    np.testing.assert_array_equal(label, drawn.label)
    assert truth["label_rate"] == label.mean() == pytest.approx(0.25, abs=0.015)
    assert drawn.probability.mean() == pytest.approx(label.mean(), abs=0.01)
    assert drawn.probability.max() > 0.9
    assert truth["best_auc"] == pytest.approx(exact_auc(label, drawn.probability), abs=1e-5)
    likelihood, rate = np.where(label == 1, drawn.probability, 1 - drawn.probability), label.mean()
    assert truth["best_logloss"] == pytest.approx(-np.log(likelihood).mean())
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert truth["best_ne"] == pytest.approx(truth["best_logloss"] / entropy)
    assert truth["last_tenth"]["rows"] == 3000
    assert truth["last_tenth"]["best_auc"] == pytest.approx(exact_auc(label[27_000:], drawn.probability[27_000:]), abs=1e-4)

    written = json.loads((tmp_path / "raw" / "train.truth.json").read_text())
    assert written == truth
    assert (written["rows"], written["seed"], written["scale"]) == (30_000, 3, 0.05)


def test_rare_values_of_a_topic_share_effects() -> None:
    model = PlantedModel(seed=0, scale=1.0, decay=0.5, groups=0.7)
    draws = np.tile(np.random.default_rng(1).random(model.draws), (2000, 1))
    draws[:, DRAWS - 1 - len(MISSING_RATES) : DRAWS - 1] = 1  # no cell is missing
    draws[:, DRAWS + 1 :] = 0  # every cell follows its row's topic
    draws[:, 2], draws[:, DRAWS] = np.linspace(0.7, 0.8, 2000), np.arange(2000) % 2 / 2  # rare values of two topics
    probability = model.rows(draws).probability
    logit = np.log(probability / (1 - probability))
    assert logit[::2].std() < 0.2 * logit.std()


def test_one_log_per_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk size, compression and repeated runs don't change the log; gzipped logs are byte for byte the same file."""

    def log(name: str, **others: Any) -> bytes:
        synth(SynthOptions(rows=1000, output=tmp_path / name, **others))
        return (tmp_path / name).read_bytes()

    first = log("a.txt")
    for number, others in enumerate(({"seed": 1}, {"scale": 0.1}, {"decay": 1.0}, {"groups": 0.5})):
        assert log(f"{number}.txt", **others) != first, others
    assert log("d.txt.gz") == log("e.txt.gz")
    assert gzip.decompress((tmp_path / "d.txt.gz").read_bytes()) == first
    assert (tmp_path / "d.truth.json").read_bytes() == (tmp_path / "a.truth.json").read_bytes()
    monkeypatch.setattr(synth_module, "_CHUNK_ROWS", 37)
    assert log("b.txt") == first


def test_bad_options() -> None:
    log = Path("log.txt")
    refuse("`rows` is 0; it must be at least 1", SynthOptions, output=log, rows=0)
    refuse("`seed` is -1; it must be at least 0", SynthOptions, output=log, rows=1, seed=-1)
    refuse("`scale` is 0.0; it must be above 0 and at most 100", SynthOptions, output=log, rows=1, scale=0.0)
    refuse("`decay` is -0.5; it must be between 0 and 10", SynthOptions, output=log, rows=1, decay=-0.5)
    refuse("`groups` is 1.5; it must be between 0 and 1", SynthOptions, output=log, rows=1, groups=1.5)


def test_existing_output(tmp_path: Path) -> None:
    log, truth = tmp_path / "log.txt", tmp_path / "log.truth.json"
    for existing in (log, truth):
        existing.write_text("precious")
        refuse(rf"{existing.name} already exists; add `overwrite`", synth, SynthOptions(rows=10, output=log))
        assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
        existing.unlink()
    refuse("is a folder; name a file", synth, SynthOptions(rows=10, output=tmp_path))
    log.write_text("old")
    synth(SynthOptions(rows=10, output=log, overwrite=True))
    assert len(log.read_bytes().splitlines()) == 10
