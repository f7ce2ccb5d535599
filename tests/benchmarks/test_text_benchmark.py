"""Training from scratch: every method runs, rates are chosen by the training loss, and finished runs are not repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.linear.rivals import galore_is_installed
from benchmarks.text import code, sst2
from benchmarks.text.runs import Method, Task, best_rate, chosen, run_task, steps_in_equal_time
from benchmarks.text.summary import code_table, sst2_table

SETTINGS = Settings(quick=True, memory=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.tsv", "dev.tsv"):
        lines = [f"{'lovely' if k % 2 else 'awful'} film number {k}\t{k % 2}" for k in range(70)]
        (tmp_path / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return tmp_path


def test_every_method_is_trained_on_sentences(folder: Path) -> None:
    rows = [row for case in sst2.run(replace(SETTINGS, data=folder)) for row in case]
    methods = [method for method in sst2.METHODS if galore_is_installed() or method.name != sst2.GALORE]
    tried = [(method.name, rate) for method in methods for rate in method.rates]
    rows, longer = rows[: len(tried)], rows[len(tried) :]
    assert [(row.provider, row.shapes["lr"]) for row in rows] == tried
    rates = {name: chosen(rows, name)[0].shapes["lr"] for name in (sst2.BUDGET, sst2.LOW_RANK)}
    steps = {name: steps_in_equal_time(rows, sst2.QUICK_STEPS, name, sst2.DENSE) for name in rates}
    assert {row.provider: (row.shapes["lr"], row.shapes["steps"]) for row in longer} == {
        name: (rate, steps[name]) for name, rate in rates.items() if steps[name] != sst2.QUICK_STEPS
    }
    params = {row.provider: row.counted["params"] for row in rows}
    assert params[sst2.BUDGET] < params[sst2.LOW_RANK] < params[sst2.DENSE] < params[sst2.LTE]
    assert all(0 <= row.p50 <= 1 for row in rows)
    assert "accuracy" in sst2.format_case(rows[:1])


def test_sentences_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data is None: name a folder with train.tsv and dev.tsv of SST-2"):
        next(sst2.run(SETTINGS))
    with pytest.raises(ValueError, match=r"name a folder with train.tsv"):
        next(sst2.run(replace(SETTINGS, data=tmp_path)))


def test_the_best_tt_model_also_trains_for_the_dense_models_seconds() -> None:
    rows = [row for case in code.run(SETTINGS) for row in case]
    last, equal = rows[-1], [row for row in rows if row.shapes["steps"] == code.QUICK_STEPS]
    assert {row.provider for row in equal} == {code.DENSE.name, *code.SPLITS}
    best = min((row for row in equal if row.provider in code.SPLITS), key=lambda row: row.counted["train_loss"])
    dense = chosen(equal, code.DENSE.name)[0]
    steps = max(1, int(code.QUICK_STEPS * dense.counted["cpu_seconds"] / best.counted["cpu_seconds"]))
    assert steps_in_equal_time(rows, code.QUICK_STEPS, best.provider, code.DENSE.name) == steps
    assert (last.provider, last.shapes["steps"], last.shapes["lr"]) == (best.provider, steps, best.shapes["lr"])


def test_other_seeds_use_the_rate_with_the_lowest_training_loss_and_finished_runs_are_not_repeated() -> None:
    runs = []

    def train(method: str, lr: float, steps: int, seed: int) -> tuple[float, dict[str, float]]:
        runs.append((method, lr, seed))
        return 0.9 - lr, {"train_loss": abs(lr - 0.02), "seconds": 1.0}

    methods = (Method(name="a", rates=(0.01, 0.02, 0.03)), Method(name="b", rates=(0.05,)))
    task = Task(op="sst2", unit="accuracy", sizes={"dim": 4}, methods=methods, steps=7, train=train)
    settings = Settings(memory=False)
    rows = [row for case in run_task(task, settings) for row in case]
    first = [("a", 0.01, 0), ("a", 0.02, 0), ("a", 0.03, 0), ("b", 0.05, 0)]
    assert runs == [*first, ("a", 0.02, 1), ("b", 0.05, 1), ("a", 0.02, 2), ("b", 0.05, 2)]
    assert [row.seed for row in chosen(rows, "a")] == [0, 1, 2]
    assert best_rate(rows, {"method": "c", "dim": 4, "steps": 7}) is None
    assert list(run_task(task, replace(settings, finished=rows))) == []
    runs.clear()
    assert len(list(run_task(task, replace(settings, finished=rows[:5], only={"method": "b"})))) == 2
    assert runs == [("b", 0.05, 1), ("b", 0.05, 2)]


def test_tables_have_the_chosen_rates_and_cpu_time() -> None:
    def train(method: str, lr: float, steps: int, seed: int) -> tuple[float, dict[str, float]]:
        sizes = {"params": 1000.0 * len(method), "peak_mib": 7.0, "accuracy": 0.25, "seconds": 9.0, "cpu_seconds": steps / 50}
        return 0.5 + seed / 10, {"train_loss": abs(lr - 0.02), **sizes}

    methods = (Method(name=sst2.DENSE, rates=(0.01, 0.02)), Method(name=sst2.LTE, rates=(0.02,)))
    for steps, seeds, spread in ((150, 3, " ± 10.0"), (600, 1, "")):
        task = Task(op="sst2", unit="accuracy", sizes={}, methods=methods, steps=steps, train=train)
        rows = [row for case in run_task(task, Settings(memory=False), seeds=seeds) for row in case]
        header, lines = sst2_table(rows)
        assert dict(zip(header, lines[0], strict=True)) == {
            "": "dense, AdamW",
            "learning rate": "0.02",
            "steps": f"{steps}",
            "accuracy, %": ("60.0" if spread else "50.0") + spread,
            "training loss": "0.000" + (" ± 0.000" if spread else ""),
            "parameters": "5,000",
            "CPU time": f"{steps // 50} s",
            "peak memory": "7 MiB",
        }
        assert [line[0] for line in lines] == ["dense, AdamW", "dense, LTE, 4 heads of rank 32"]
    task = Task(op="code", unit="loss", sizes={}, methods=(code.DENSE, *code.TT[:1]), steps=10, train=train)
    _, lines = code_table([row for case in run_task(task, Settings(memory=False)) for row in case])
    assert [line[:4] for line in lines] == [["dense", "0.004", "10", "0 s"], [code.TT[0].name, "0.006", "10", "0 s"]]
