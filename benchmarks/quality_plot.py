"""NE against bytes of the large tables, a panel for each data set, a line for each way of holding them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.quality import chosen
from benchmarks.rows import Row


def quality_figure(rows: Sequence[Row]) -> Figure:
    """Medians over seeds, bars from the best to the worst of them; the dense model as a dashed line."""
    rows = chosen(rows)
    data_sets = list(dict.fromkeys(row.shapes["data"] for row in rows))
    methods = list(dict.fromkeys(row.provider for row in rows if row.provider != "dense"))
    figure = Figure(figsize=(5.5 * len(data_sets), 4.6), layout="constrained")
    for panel, data in zip(figure.subplots(1, len(data_sets), squeeze=False)[0], data_sets, strict=True):
        mine = [row for row in rows if row.shapes["data"] == data]
        for k, method in enumerate(methods):
            runs: dict[float, list[Row]] = {}
            for row in mine:
                if row.provider == method:
                    runs.setdefault(row.shapes["compression"], []).append(row)
            points = sorted((median(r.counted["bytes"] for r in each), [r.p50 for r in each]) for each in runs.values())
            middle = [median(nes) for _, nes in points]
            spread = [[m - min(nes) for m, (_, nes) in zip(middle, points, strict=True)],
                      [max(nes) - m for m, (_, nes) in zip(middle, points, strict=True)]]  # fmt: skip
            sizes = [size for size, _ in points]
            bold = 2.5 if method == "TT + rows" else 1.0
            panel.errorbar(
                sizes,
                middle,
                yerr=spread,
                fmt="o-",
                markersize=4,
                capsize=2,
                linewidth=bold,
                color=colormaps["tab20"](k),
                label=method,
            )
        if dense := [row.p50 for row in mine if row.provider == "dense"]:
            panel.axhline(median(dense), color="black", linestyle="--", linewidth=1, label="dense")
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(data)
        panel.set_xlabel("bytes of the large tables, indices included")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("NE on the test split, lower is better")
    return figure
