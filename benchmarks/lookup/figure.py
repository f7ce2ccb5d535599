"""Plots two sweeps that share one case: time against batch size at one skew, and against unique rows at one batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.harness.rows import Row
from benchmarks.harness.workload import PASSES


def sweep_figure(rows: Sequence[Row]) -> Figure:
    """Plot a row of panels for each pass and a line for each provider, on logarithmic axes."""
    skew, batch = _most_common(rows, "ids"), _most_common(rows, "batch")
    sweeps: list[tuple[str, Sequence[Row], Callable[[Row], float]]] = [
        (f"batch (ids {skew})", [row for row in rows if row.shapes["ids"] == skew], lambda row: row.shapes["batch"]),
        (
            f"unique rows (batch {batch:,}, ids uniform to skewed)",
            [row for row in rows if row.shapes["batch"] == batch],
            lambda row: row.counted["unique_ids"],
        ),
    ]
    passes = [pass_ for pass_ in PASSES if any(row.pass_ == pass_ for row in rows)]
    providers = list(dict.fromkeys(row.provider for row in rows))
    figure = Figure(figsize=(9, 1 + 2.5 * len(passes)), layout="constrained")
    axes = figure.subplots(len(passes), len(sweeps), squeeze=False, sharex="col", sharey="row")
    for pass_, line in zip(passes, axes, strict=True):
        for (label, swept, size), panel in zip(sweeps, line, strict=True):
            for k, provider in enumerate(providers):
                selected = sorted((row for row in swept if (row.provider, row.pass_) == (provider, pass_)), key=size)
                sizes = [size(row) for row in selected]
                panel.loglog(sizes, [row.p50 for row in selected], "o-", markersize=4, color=f"C{k}", label=provider)
                panel.fill_between(sizes, [row.p20 for row in selected], [row.p80 for row in selected], color=f"C{k}", alpha=0.2)
            panel.set_title(pass_)
            panel.grid(alpha=0.3)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter("{x:,g}")
                axis.set_minor_formatter(NullFormatter())
            if pass_ == passes[-1]:
                panel.set_xlabel(label)
        line[0].set_ylabel("time, ms (p20, p50, p80)")
    return figure


def _most_common(rows: Sequence[Row], size: str) -> object:
    return Counter(row.shapes[size] for row in rows).most_common(1)[0][0]
