"""Plots where copies of cores pay off, by the planner's estimates."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.harness.rows import Row, one, select


def grid_figure(rows: Sequence[Row]) -> Figure:
    """Plot the estimated time of moving bags relative to that of copying cores; filled where the plan only copies cores."""
    gpus, dims, ranks, batches = (
        list(dict.fromkeys(row.shapes[size] for row in rows)) for size in ("gpus", "dim", "rank", "batch")
    )
    figure = Figure(figsize=(4 * len(gpus), 2.8 * len(dims)), layout="constrained")
    axes = figure.subplots(len(dims), len(gpus), squeeze=False, sharex=True, sharey=True)
    for dim, line in zip(dims, axes, strict=True):
        for count, panel in zip(gpus, line, strict=True):
            for k, rank in enumerate(ranks):
                of = {batch: select(rows, gpus=count, dim=dim, rank=rank, batch=batch) for batch in batches}
                ratios = [one(case, provider="table_wise").p50 / one(case, provider="data_parallel").p50 for case in of.values()]
                panel.loglog(batches, ratios, color=f"C{k}", label=f"rank {rank}")
                for (batch, case), ratio in zip(of.items(), ratios, strict=True):
                    copies = set(one(case, provider="TTShardingPlanner").counted) == {"data_parallel"}
                    panel.plot(batch, ratio, "o", markersize=5, color=f"C{k}", markerfacecolor=f"C{k}" if copies else "white")
            panel.axhline(1, color="black", linestyle="--", linewidth=1)
            panel.set_title(f"{count} GPUs, dim {dim}", fontsize=9)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("table-wise / data-parallel")
    for panel in axes[-1]:
        panel.set_xlabel("samples per GPU")
        panel.xaxis.set_minor_formatter(NullFormatter())
    return figure
