"""Sentence classification on SST-2 from scratch at the layer sizes of CoMERA's transformer: dense, TT, and rivals.

Run it by `python -m benchmarks.run sst2 --data FOLDER`, where FOLDER has `train.tsv` and `dev.tsv` of GLUE's SST-2 (with columns
`sentence` and `label`). Every run is one of `examples/classify_text.py` with one encoder instead of six, so that it takes minutes;
model and optimizer are replaced for forms that the example lacks. The parameters that a method replaces learn at its chosen rate,
all others at 0.0003; in dense and low-rank models all parameters learn at the chosen rate. TT and low-rank models, whose steps are
faster, also train for as many steps as fit into the dense model's CPU seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.harness.trainings import Trained, best_rate, train_all
from benchmarks.linear.lte import LTELinear, lora_the_explorer_, merge_every_
from benchmarks.linear.rivals import galore, galore_groups, galore_is_installed, low_rank
from benchmarks.text.runs import counted, steps_in_equal_time
from comera_rec.training.config import load_settings
from examples import classify_text

DENSE, GALORE, LTE, LOW_RANK = "dense", "GaLore", "LTE", "low rank"
BUDGET, ACHIEVEMENT = "TT budget", "TT achievement"
RATES = {
    DENSE: (0.0001, 0.0003, 0.001),
    BUDGET: (0.0005, 0.001, 0.002, 0.004),
    ACHIEVEMENT: (0.0005, 0.001, 0.002, 0.004),
    LOW_RANK: (0.0001, 0.0003, 0.001),
    LTE: (0.00001, 0.00003, 0.0001),
    GALORE: (0.001, 0.003, 0.01),  # its updates are scaled by a quarter
}
STEPS, QUICK_STEPS = 400, 4
REDUCTION = ("model.num_layers=1", "model.vocab_size=8000", "tokens.row_shape=[10,10,8,10]")
LR_OTHER = 0.0003
TARGET = 0.5  # fraction of the parameters of all TT modules
PRICED_RATE = 0.02  # learning rate of rank parameters, which start at 1 and must fall below 0.05 in the late stage


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of all methods.

    Raises:
        ValueError: without the data.
    """
    if settings.data is None or not (settings.data / "train.tsv").exists():
        raise ValueError(f"--data is {settings.data}: name a folder with train.tsv and dev.tsv of SST-2")
    steps = QUICK_STEPS if settings.quick else STEPS
    base = [f"data.train={settings.data / 'train.tsv'}", f"data.dev={settings.data / 'dev.tsv'}", *REDUCTION]
    if settings.quick:
        base += [
            "model.embed_dim=48",
            "model.num_heads=2",
            "model.ff_dim=96",
            "tokens.col_shape=[2,2,3,4]",
            "linears.policy=always",
        ]
        base += ["linears.min_features=32", "linears.tt_ranks=8"]
    settings_of = partial(load_settings, classify_text.Settings, classify_text.CONFIG)
    sizes = settings_of(base)
    sentences = classify_text.read_sentences(sizes)

    def trained(shapes: dict[str, Any], seed: int) -> Trained:
        method, lr, steps = shapes["method"], shapes["lr"], shapes["steps"]
        run_settings = settings_of([*base, f"seed={seed}", f"training.steps={steps}", *overrides(method, lr, steps)])

        def train() -> dict[str, Any]:
            torch.manual_seed(seed)
            dense_or_tt = classify_text.Classifier(run_settings, len(sentences.classes))
            model, optimizer = _rival(method, dense_or_tt, lr, run_settings.training.weight_decay)
            return classify_text.train(model, sentences, run_settings, optimizer)

        metrics = counted(train, settings, "accuracy")
        return metrics.pop("accuracy"), metrics

    shapes = {
        "encoders": sizes.model.num_layers,
        "dim": sizes.model.embed_dim,
        "ff": sizes.model.ff_dim,
        "vocabulary": sentences.tokenizer.get_vocab_size(),
        "batch": sizes.training.batch_size,
    }
    cases = [
        ({"method": method, **shapes, "steps": steps}, rates)
        for method, rates in RATES.items()
        if galore_is_installed() or method != GALORE
    ]
    rows = list(settings.finished)
    yield from train_all("sst2", cases, trained, settings, rows)
    if not settings.only:
        for case, _ in cases:
            if case["method"] in (BUDGET, LOW_RANK):  # these have faster steps
                longer = {**case, "steps": steps_in_equal_time(rows, steps, case["method"], DENSE)}
                rates = [rate for rate in [best_rate(rows, case)] if rate]
                yield from train_all("sst2", [(longer, rates)], trained, settings, rows)


def overrides(method: str, lr: float, steps: int) -> list[str]:
    """The example's settings for a method."""
    if not method.startswith("TT"):
        form = "tt" if method == LOW_RANK else "dense"  # low-rank layers are contracted halves of TT layers
        return [f"tokens.format={form}", f"linears.format={form}", f"training.lr_dense={lr}"]
    rates = [f"training.lr_cores={lr}", f"training.lr_dense={LR_OTHER}", f"training.lr_ranks={LR_OTHER}"]
    stages = [
        f"ranks.early_steps={max(1, steps // 2)}",
        f"ranks.late_steps={max(1, 3 * steps // 10)}",
        f"ranks.truncate_every={max(1, steps // 20)}",
    ]
    stages += [f"ranks.target_size={TARGET}"]
    if method == ACHIEVEMENT:
        stages += ["ranks.objective=achievement", f"training.lr_ranks={PRICED_RATE}"]
    return rates + stages


def _rival(method: str, model: nn.Module, lr: float, weight_decay: float) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert a model to a method's form; return it with its optimizer, or None for the example's optimizer."""
    if method == LOW_RANK:
        return low_rank(model), None
    if method == GALORE:
        return model, galore(galore_groups(model, lr=lr, lr_other=LR_OTHER, weight_decay=weight_decay))
    if method == LTE:
        model = lora_the_explorer_(model)
        heads = {id(p) for m in model.modules() if isinstance(m, LTELinear) for p in (m.down_NrI, m.up_NOr)}
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) in heads], "lr": lr},
            {"params": [p for p in trained if id(p) not in heads], "lr": LR_OTHER},
        ]
        return model, merge_every_(torch.optim.AdamW(groups, weight_decay=weight_decay, fused=True), model)
    return model, None
