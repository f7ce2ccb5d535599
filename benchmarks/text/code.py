"""Masked-language pre-training on functions of Python's standard library: dense, and TT four times smaller.

Every run is a smaller one of `examples/pretrain_code.py`, which takes minutes, without the second phase. TT models try learning
rates and splits of their parameters between layers and table; the best combination with seed 0 takes the other seeds, and then
trains for as many steps as fit into the dense model's CPU seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.text.runs import SEEDS, Method, Task, counted, format_case, run_task, steps_in_equal_time
from comera_rec.training.config import load_settings
from examples import pretrain_code

__all__ = ["format_case", "run"]

DENSE = Method(name="dense", rates=(0.001, 0.002, 0.004))
RANKS = (32, 48), (24, 54), (16, 60)  # of the layers and of the table
SPLITS = {f"TT, ranks {layers} and {table}": (layers, table) for layers, table in RANKS}
TT = tuple(Method(name=name, rates=(0.0015, 0.003, 0.006)) for name in SPLITS)
LR_OTHER = 0.002  # learning rate of the dense parameters of TT models: positions, biases, norms
STEPS, QUICK_STEPS = 300, 3
PACKAGES = ("asyncio", "email", "http", "idlelib", "importlib", "json", "logging", "multiprocessing", "tkinter", "unittest", "xml")


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of all runs."""
    steps = QUICK_STEPS if settings.quick else STEPS
    packages = PACKAGES[5:6] if settings.quick else PACKAGES
    base = ["model.vocab_size=4000", "model.num_layers=2", "model.max_length=48", f"data.packages={list(packages)}", "ranks=none"]
    base += ["tokens.row_shape=[16,16,16]", "linears.order=2"]
    if settings.quick:
        base += ["model.embed_dim=32", "model.ff_dim=64", "tokens.col_shape=[2,4,4]", "linears.min_features=32"]
    settings_of = partial(load_settings, pretrain_code.Settings, pretrain_code.CONFIG)
    sizes = settings_of(base)
    functions = pretrain_code.read_functions(sizes)

    def train(method: str, lr: float, steps: int, seed: int) -> tuple[float, dict[str, float]]:
        run_settings = settings_of([*base, f"seed={seed}", f"training.steps={steps}", *overrides(method, lr)])
        torch.manual_seed(seed)
        metrics = pretrain_code.train(pretrain_code.MaskedLanguageModel(run_settings), functions, run_settings)
        return metrics["loss"], {**counted(metrics), "accuracy": metrics["accuracy"]}

    shapes = {
        "layers": sizes.model.num_layers,
        "dim": sizes.model.embed_dim,
        "ff": sizes.model.ff_dim,
        "vocabulary": functions.tokenizer.get_vocab_size(),
        "batch": sizes.training.batch_size,
    }
    rows = list(settings.finished)

    def trained(methods: tuple[Method, ...], steps: int, seeds: int) -> Iterator[list[Row]]:
        task = Task(op="code", unit="loss", sizes=shapes, methods=methods, steps=steps, train=train)
        for case in run_task(task, replace(settings, finished=rows), seeds=seeds):
            rows.extend(case)
            yield case

    yield from trained((DENSE, *TT), steps, seeds=1)
    best = best_split([row for row in rows if row.shapes["steps"] == steps])
    yield from trained((DENSE, best), steps, seeds=SEEDS)
    longer = steps_in_equal_time(rows, steps, best.name, DENSE.name)
    yield from trained((best,), longer, seeds=SEEDS)


def overrides(method: str, lr: float) -> list[str]:
    """The example's settings for a method."""
    if method == DENSE.name:
        return ["tokens.format=dense", "linears.format=dense", f"training.lr_dense={lr}"]
    layers, table = SPLITS[method]
    rates = [f"training.lr_cores={lr}", f"training.lr_ranks={lr / 10}", f"training.lr_dense={LR_OTHER}"]
    return [f"linears.tt_ranks={layers}", f"tokens.tt_ranks={table}", *rates]


def best_split(rows: list[Row]) -> Method:
    """The TT method with the lowest training loss, with only its best rate."""
    row = min((row for row in rows if row.provider in SPLITS), key=lambda row: row.counted["train_loss"])
    return Method(name=row.provider, rates=(row.shapes["lr"],))
