"""Training from scratch: every method runs, and the fast ones also for the seconds of the dense model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import select
from benchmarks.harness.trainings import at_best_rate, best_rate
from benchmarks.linear.rivals import galore_is_installed
from benchmarks.text import code, sst2
from benchmarks.text.runs import steps_in_equal_time

SETTINGS = Settings(quick=True, memory=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.tsv", "dev.tsv"):
        lines = [f"{'lovely' if k % 2 else 'awful'} film number {k}\t{k % 2}" for k in range(70)]
        (tmp_path / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return tmp_path


def test_every_method_is_trained_on_sentences(folder: Path) -> None:
    rows = [row for case in sst2.run(replace(SETTINGS, data=folder)) for row in case]
    methods = [method for method in sst2.RATES if galore_is_installed() or method != sst2.GALORE]
    tried = [(method, rate) for method in methods for rate in sst2.RATES[method]]
    rows, longer = rows[: len(tried)], rows[len(tried) :]
    assert [(row.provider, row.shapes["lr"]) for row in rows] == tried
    rates = {name: best_rate(rows, select(rows, provider=name)[0].shapes) for name in (sst2.BUDGET, sst2.LOW_RANK)}
    steps = {name: steps_in_equal_time(rows, sst2.QUICK_STEPS, name, sst2.DENSE) for name in rates}
    assert {row.provider: (row.shapes["lr"], row.shapes["steps"]) for row in longer} == {
        name: (rate, steps[name]) for name, rate in rates.items() if steps[name] != sst2.QUICK_STEPS
    }
    params = {row.provider: row.counted["params"] for row in rows}
    assert params[sst2.BUDGET] < params[sst2.LOW_RANK] < params[sst2.DENSE] < params[sst2.LTE]
    assert all(0 <= row.p50 <= 1 for row in rows)


def test_sentences_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data is None: name a folder with train.tsv and dev.tsv of SST-2"):
        next(sst2.run(SETTINGS))
    with pytest.raises(ValueError, match=r"name a folder with train.tsv"):
        next(sst2.run(replace(SETTINGS, data=tmp_path)))


def test_the_best_tt_model_also_trains_for_the_dense_models_seconds() -> None:
    rows = [row for case in code.run(SETTINGS) for row in case]
    last, equal = rows[-1], [row for row in rows if row.shapes["steps"] == code.QUICK_STEPS]
    assert {row.provider for row in equal} == {*code.RATES}
    best = min((row for row in equal if row.provider in code.SPLITS), key=lambda row: row.counted["train_loss"])
    dense = select(at_best_rate(equal), provider=code.DENSE)[0]
    steps = max(1, int(code.QUICK_STEPS * dense.counted["cpu_seconds"] / best.counted["cpu_seconds"]))
    assert steps_in_equal_time(rows, code.QUICK_STEPS, best.provider, code.DENSE) == steps
    assert (last.provider, last.shapes["steps"], last.shapes["lr"]) == (best.provider, steps, best.shapes["lr"])
