"""Tables of training runs from scratch: (header, lines) from rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from benchmarks.harness.rows import Row
from benchmarks.text import code, sst2
from benchmarks.text.runs import chosen

Table = tuple[list[str], list[list[str]]]

NAMES = {
    sst2.DENSE: "dense, AdamW",
    sst2.BUDGET: 'TT, ranks adapted, objective "budget"',
    sst2.ACHIEVEMENT: 'TT, ranks adapted, objective "achievement" as published',
    sst2.LOW_RANK: "linear layers of rank 30",
    sst2.LTE: "dense, LTE, 4 heads of rank 32",
    sst2.GALORE: "dense, GaLore rank 128",
}


def sst2_table(rows: Sequence[Row]) -> Table:
    """Accuracy, parameters, time and memory of every method."""
    lines = []
    for method, title in NAMES.items():
        for steps in sorted({row.shapes["steps"] for row in rows if row.provider == method}):
            runs = chosen([row for row in rows if row.shapes["steps"] == steps], method)
            lines.append(
                [
                    title,
                    f"{runs[0].shapes['lr']:g}",
                    f"{steps}",
                    spread([100 * row.p50 for row in runs], 1),
                    spread([row.counted["train_loss"] for row in runs], 3),
                    f"{mean(row.counted['params'] for row in runs):,.0f}",
                    f"{mean(row.counted['cpu_seconds'] for row in runs):.0f} s",
                    f"{mean(row.counted['peak_mib'] for row in runs):,.0f} MiB",
                ]
            )
    header = ["", "learning rate", "steps", "accuracy, %", "training loss", "parameters", "CPU time", "peak memory"]
    return header, lines


def code_table(rows: Sequence[Row]) -> Table:
    """Validation loss of the dense model, and of TT at equal steps and in equal time."""
    lines = []
    for method in (code.DENSE.name, *code.SPLITS):
        for steps in sorted({row.shapes["steps"] for row in rows if row.provider == method}):
            runs = chosen([row for row in rows if row.shapes["steps"] == steps], method)
            lines.append(
                [
                    method,
                    f"{runs[0].shapes['lr']:g}",
                    f"{steps}",
                    f"{mean(row.counted['cpu_seconds'] for row in runs):.0f} s",
                    spread([row.p50 for row in runs], 3),
                    f"{100 * mean(row.counted['accuracy'] for row in runs):.1f} %",
                    f"{runs[0].counted['params']:,.0f}",
                ]
            )
    return ["", "learning rate", "steps", "CPU time", "validation loss", "accuracy", "parameters"], lines


def spread(values: Sequence[float], digits: int) -> str:
    """Format mean and standard deviation, or a single value."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
