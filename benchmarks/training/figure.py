"""Plots NE, peak memory and time of a step of whole models against their size."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.figure import Figure

from benchmarks.harness.rows import Row
from benchmarks.harness.trainings import at_best_rate

PANELS = {"NE on the test split": "ne", "peak memory, MiB": "peak_mib", "time of a step, ms": "step_ms"}


def dlrm_figure(rows: Sequence[Row]) -> Figure:
    """Plot medians over seeds at each size's best learning rate, with bars from lowest to highest, a line for each form.

    Only data sets of the most sizes are drawn: where there is one size, there is no line.
    """
    sizes_of: dict[str, set[float]] = {}
    for row in rows:
        sizes_of.setdefault(row.shapes["data"], set()).add(row.shapes["compression"])
    most = max(map(len, sizes_of.values()))
    rows = [row for row in rows if len(sizes_of[row.shapes["data"]]) == most]
    cases: dict[tuple[str, ...], dict[float, list[Row]]] = {}
    for row in at_best_rate(rows):
        cases.setdefault((row.shapes["data"], row.provider), {}).setdefault(row.shapes["compression"], []).append(row)
    figure = Figure(figsize=(12, 4), layout="constrained")
    for panel, (title, key) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for names, by_size in cases.items():
            runs = sorted(by_size.values(), key=lambda runs: runs[0].counted["bytes"])
            values = [[row.p50 if key == "ne" else row.counted[key] for row in each] for each in runs]
            middle = [median(each) for each in values]
            below = [median(each) - min(each) for each in values]
            above = [max(each) - median(each) for each in values]
            places = [each[0].counted["bytes"] / 2**20 for each in runs]
            panel.errorbar(places, middle, yerr=[below, above], fmt="o-", markersize=4, capsize=2, label=", ".join(names))
        panel.set_xscale("log")
        if key != "ne":
            panel.set_ylim(bottom=0)
        panel.set_title(title)
        panel.set_xlabel("size of the model, MiB")
        panel.grid(alpha=0.3)
    return figure
