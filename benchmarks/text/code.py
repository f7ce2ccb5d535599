"""Masked-language pre-training on functions of Python's standard library: dense, and TT four times smaller.

Every run is a smaller one of `examples/pretrain_code.py`, which takes minutes, without the second phase. TT models try learning
rates and splits of their parameters between layers and table; the best combination with seed 0 takes the other seeds, and then
trains for as many steps as fit into the dense model's CPU seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row, select
from benchmarks.harness.trainings import SEEDS, Trained, train_all
from benchmarks.text.runs import counted, steps_in_equal_time
from comera_rec.training.config import load_settings
from examples import pretrain_code

DENSE = "dense"
RANKS = (32, 48), (24, 54), (16, 60)  # of the layers and of the table
SPLITS = {f"TT, ranks {layers} and {table}": (layers, table) for layers, table in RANKS}
RATES = {DENSE: (0.001, 0.002, 0.004)} | dict.fromkeys(SPLITS, (0.0015, 0.003, 0.006))
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

    def trained(shapes: dict[str, Any], seed: int) -> Trained:
        own = [f"seed={seed}", f"training.steps={shapes['steps']}", *overrides(shapes["method"], shapes["lr"])]
        run_settings = settings_of([*base, *own])

        def train() -> dict[str, Any]:
            torch.manual_seed(seed)
            return pretrain_code.train(pretrain_code.MaskedLanguageModel(run_settings), functions, run_settings)

        metrics = counted(train, settings, "loss", "accuracy")
        return metrics.pop("loss"), metrics

    shapes = {
        "layers": sizes.model.num_layers,
        "dim": sizes.model.embed_dim,
        "ff": sizes.model.ff_dim,
        "vocabulary": functions.tokenizer.get_vocab_size(),
        "batch": sizes.training.batch_size,
    }
    rows = list(settings.finished)

    def all_of(rates: Mapping[str, tuple[float, ...]], steps: int, seeds: int = SEEDS) -> Iterator[list[Row]]:
        cases = [({"method": method, **shapes, "steps": steps}, tried) for method, tried in rates.items()]
        return train_all("code", cases, trained, settings, rows, seeds=seeds)

    yield from all_of(RATES, steps, seeds=1)
    best = min((row for row in select(rows, steps=steps) if row.provider in SPLITS), key=lambda row: row.counted["train_loss"])
    rates = {best.provider: (best.shapes["lr"],)}
    yield from all_of({DENSE: RATES[DENSE], **rates}, steps)
    yield from all_of(rates, steps_in_equal_time(rows, steps, best.provider, DENSE))


def overrides(method: str, lr: float) -> list[str]:
    """The example's settings for a method."""
    if method == DENSE:
        return ["tokens.format=dense", "linears.format=dense", f"training.lr_dense={lr}"]
    layers, table = SPLITS[method]
    rates = [f"training.lr_cores={lr}", f"training.lr_ranks={lr / 10}", f"training.lr_dense={LR_OTHER}"]
    return [f"linears.tt_ranks={layers}", f"tokens.tt_ranks={table}", *rates]
