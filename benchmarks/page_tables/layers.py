"""Tables of linear layers and of the models trained with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean

from benchmarks.harness.rows import Row, one, select
from benchmarks.harness.text import short
from benchmarks.harness.trainings import at_best_rate
from benchmarks.page_tables.rows import EPYC, EPYC_AVX512, XEON, committed, markdown, source, spread
from benchmarks.text import code as code_benchmark
from benchmarks.text import sst2 as sst2_benchmark


def linear() -> str:
    """How many times faster TTLinear is than nn.Linear."""
    rows = select(committed(EPYC, "linear"), provider="TTLinear", unit="ms")
    lines = []
    for forward in select(rows, pass_="forward"):
        sizes = forward.shapes
        ratios = [row.ratios["nn.Linear"] for row in (forward, one(rows, pass_="forward+backward", **sizes))]
        layer = [f"{sizes['batch']:,}", f"{sizes['in']} x {sizes['out']}", " ".join(map(str, sizes["ranks"]))]
        lines.append([*layer, *(f"{ratio:.1f}x" for ratio in ratios)])
    return markdown(["batch", "layer", "TT ranks", "forward", "forward and backward"], lines, left=0) + source(EPYC, "linear")


def transformer() -> str:
    """A training step of CoMERA's six-encoder transformer."""
    rows = committed(EPYC_AVX512, "transformer")
    names = {
        "dense": "dense, Adam",
        "GaLore": "dense, GaLore rank 128",
        "GaLore, 8-bit": "the same, 8-bit moments",
        "GaLore, layer-wise": "the same, updated in backward",
        "LTE": "dense, LTE, 4 heads of rank 32",
        "low rank": "linear layers of rank 30",
        "tensor train": "TT layers and embedding",
    }
    batches = list(dict.fromkeys(row.shapes["batch"] for row in rows))
    lines = []
    for provider, title in names.items():
        if not select(rows, provider=provider):
            continue  # not measured on this machine
        ms = [one(rows, provider=provider, unit="ms", batch=batch) for batch in batches]
        lines.append(
            [
                title,
                f"{ms[0].counted['params']:,.0f}",
                f"{short(ms[0].counted['training_state_mib'])} MiB",
                *(f"{short(row.p50 / 1000)} s" for row in ms),
            ]
        )
    header = ["", "parameters", "training state", *(f"batch {batch}" for batch in batches)]
    return markdown(header, lines) + source(EPYC_AVX512, "transformer")


def sst2() -> str:
    """SST-2 trained from scratch: accuracy, parameters, time and memory of every method."""
    names = {
        sst2_benchmark.DENSE: "dense, AdamW",
        sst2_benchmark.BUDGET: 'TT, ranks adapted, objective "budget"',
        sst2_benchmark.ACHIEVEMENT: 'TT, ranks adapted, objective "achievement" as published',
        sst2_benchmark.LOW_RANK: "linear layers of rank 30",
        sst2_benchmark.LTE: "dense, LTE, 4 heads of rank 32",
        sst2_benchmark.GALORE: "dense, GaLore rank 128",
    }
    lines = [
        [
            names[runs[0].provider],
            f"{runs[0].shapes['lr']:g}",
            f"{runs[0].shapes['steps']}",
            spread([100 * row.p50 for row in runs], 1),
            spread([row.counted["train_loss"] for row in runs], 3),
            f"{mean(row.counted['params'] for row in runs):,.0f}",
            f"{mean(row.counted['cpu_seconds'] for row in runs):.0f} s",
            f"{mean(row.counted['peak_mib'] for row in runs):,.0f} MiB",
        ]
        for runs in _trainings("sst2", names)
    ]
    header = ["", "learning rate", "steps", "accuracy, %", "training loss", "parameters", "CPU time", "peak memory"]
    return markdown(header, lines) + source(XEON, "sst2", "sst2 --data FOLDER --threads 1")


def code() -> str:
    """Pre-training on code: validation loss of the dense model, and of TT four times smaller at equal steps and in equal time."""
    lines = [
        [
            runs[0].provider,
            f"{runs[0].shapes['lr']:g}",
            f"{runs[0].shapes['steps']}",
            f"{mean(row.counted['cpu_seconds'] for row in runs):.0f} s",
            spread([row.p50 for row in runs], 3),
            f"{100 * mean(row.counted['accuracy'] for row in runs):.1f} %",
            f"{runs[0].counted['params']:,.0f}",
        ]
        for runs in _trainings("code", code_benchmark.RATES)
    ]
    header = ["", "learning rate", "steps", "CPU time", "validation loss", "accuracy", "parameters"]
    return markdown(header, lines) + source(XEON, "code", "code --threads 1")


def _trainings(benchmark: str, methods: Iterable[str]) -> Iterator[list[Row]]:
    """Yield the runs of each method and number of steps, at the rate that it chose."""
    rows = at_best_rate(committed(XEON, benchmark))
    for method in methods:
        runs = select(rows, provider=method)
        for steps in sorted({row.shapes["steps"] for row in runs}):
            yield select(runs, steps=steps)
