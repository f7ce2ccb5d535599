"""Plots NE against bytes of the large tables: a panel for each data set, a line for each method."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.harness.rows import Row
from benchmarks.harness.text import format_size
from benchmarks.quality.runs import METHODS, TT_METHODS, VARIED, chosen

MARKERS = "osD^v<>Ph*"


def save_figure(measured: Sequence[Row], path: Path, *, source: str) -> None:
    """Plot medians over seeds with bars from best to worst, TT tables in bold, and the dense model as a dashed line.

    The PNG's metadata keep `source`.
    """
    rows = [row for row in chosen(measured) if row.provider in METHODS and row.shapes["data"] not in VARIED]
    data_sets = list(dict.fromkeys(row.shapes["data"] for row in rows))
    figure = Figure(figsize=(5.5 * len(data_sets), 6.5), layout="constrained")
    for panel, data in zip(figure.subplots(1, len(data_sets), squeeze=False)[0], data_sets, strict=True):
        selected = [row for row in rows if row.shapes["data"] == data]
        for k, method in enumerate(METHODS[1:]):
            if runs := [row for row in selected if row.provider == method]:
                _draw(panel, runs, method, k)
        if dense := [row.p50 for row in selected if row.provider == "dense"]:
            panel.axhline(median(dense), color="black", linestyle="--", linewidth=1, label="dense")
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(data)
        panel.set_xlabel("bytes of the large tables, indices included")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("NE on the test split, lower is better")
    first = measured[0]
    sizes = {name: size for name, size in first.shapes.items() if all(row.shapes.get(name) == size for row in measured)}
    title = f"{first.op}: {', '.join(f'{name} {format_size(size)}' for name, size in sizes.items())}, {first.dtype}"
    first_rows = {row.machine: row for row in reversed(measured)}.values()  # of each machine
    machines = [f"{row.machine}, {row.threads} threads, commit {row.commit}" for row in first_rows]
    figure.suptitle("\n".join([textwrap.fill(title, width=int(13 * figure.get_figwidth())), *machines]), fontsize=9)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120, metadata={"Source": source})


def _draw(panel: Axes, rows: Sequence[Row], method: str, k: int) -> None:
    runs = [[row for row in rows if row.shapes["compression"] == size] for size in {row.shapes["compression"] for row in rows}]
    points = sorted((median(r.counted["bytes"] for r in each), [r.p50 for r in each]) for each in runs)
    nes = [median(each) for _, each in points]
    panel.errorbar(
        [size for size, _ in points],
        nes,
        yerr=[[ne - min(each) for ne, (_, each) in zip(nes, points, strict=True)],
              [max(each) - ne for ne, (_, each) in zip(nes, points, strict=True)]],
        fmt=f"{MARKERS[k % len(MARKERS)]}-",
        markersize=4,
        capsize=2,
        linewidth=2.5 if method in TT_METHODS else 0.8,
        color=colormaps["tab20"](k),
        label=method,
    )  # fmt: skip
