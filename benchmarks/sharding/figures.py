"""Plots of the sharding benchmarks: bytes and steps on processes, modeled steps on GPUs, and where copies of cores pay off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.harness.rows import Row

STYLES = ("s--", "o-", "o-", "o-")  # dashed, because its line may coincide with another


def distributed_figure(rows: Sequence[Row]) -> Figure:
    """Plot, against processes and for each batch, the bytes sent (bars: counted, ticks: by formula) and the step's time."""
    batches, worlds, providers = (_distinct(rows, size) for size in (_shape("batch"), _shape("processes"), _provider))
    figure = Figure(figsize=(4.6 * len(batches), 6), layout="constrained")
    axes = figure.subplots(2, len(batches), squeeze=False, sharex=True, sharey="row")
    width = 0.8 / len(providers)
    for batch, (above, below) in zip(batches, axes.T, strict=True):
        for k, provider in enumerate(providers):
            selected = [row for row in rows if row.provider == provider and row.shapes["batch"] == batch]
            places = [worlds.index(row.shapes["processes"]) + width * (k - (len(providers) - 1) / 2) for row in selected]
            sent, formula = ([_sum(row, what) / 2**10 for row in selected] for what in ("sent, ", "formula, "))
            above.bar(places, sent, width, color=f"C{k}", label=provider)
            above.plot(places, formula, "k_", markersize=9, label="by formula" if provider == providers[-1] else None)
            below.errorbar(places, [row.p50 for row in selected], yerr=_spread(selected), fmt="o", markersize=4, color=f"C{k}")
        above.set_title(f"{batch:,} samples per process")
        below.set_xticks(range(len(worlds)), [f"{world} process{'es' * (world > 1)}" for world in worlds])
        for panel in (above, below):
            panel.set_yscale("log")
            panel.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylim(bottom=100)  # bars have no meaningful lower end on a logarithmic axis
    axes[0, 0].set_ylabel("KiB sent by a process in a step")
    axes[1, 0].set_ylabel(f"step, ms; {rows[0].shapes['cores']} cores for all processes")
    return figure


def scale_figure(rows: Sequence[Row]) -> Figure:
    """Plot the modeled step against the batch, with a column for each number of GPUs and a row for each compression."""
    gpus, compressions, providers = (_distinct(rows, size) for size in (_shape("gpus"), _shape("compression"), _provider))
    figure = Figure(figsize=(4 * len(gpus), 3.2 * len(compressions)), layout="constrained")
    axes = figure.subplots(len(compressions), len(gpus), squeeze=False, sharex=True, sharey=True)
    for compression, line in zip(compressions, axes, strict=True):
        for count, panel in zip(gpus, line, strict=True):
            for k, provider in enumerate(providers):
                selected = [
                    row
                    for row in rows
                    if (row.provider, row.shapes["gpus"], row.shapes["compression"]) == (provider, count, compression)
                ]
                panel.loglog(
                    [row.shapes["batch"] for row in selected],
                    [row.p50 for row in selected],
                    STYLES[k],
                    color=f"C{k}",
                    label=provider,
                )
            panel.set_title(f"{count} GPUs, tables {compression:g}x smaller", fontsize=9)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("modeled step, ms")
    _label_batches(axes[-1])
    return figure


def grid_figure(rows: Sequence[Row]) -> Figure:
    """Plot the estimated time of moving bags relative to that of copying cores; filled where the plan only copies cores."""
    gpus, dims, ranks = (_distinct(rows, _shape(size)) for size in ("gpus", "dim", "rank"))
    figure = Figure(figsize=(4 * len(gpus), 2.8 * len(dims)), layout="constrained")
    axes = figure.subplots(len(dims), len(gpus), squeeze=False, sharex=True, sharey=True)
    for dim, line in zip(dims, axes, strict=True):
        for count, panel in zip(gpus, line, strict=True):
            for k, rank in enumerate(ranks):
                selected = [row for row in rows if [row.shapes[size] for size in ("gpus", "dim", "rank")] == [count, dim, rank]]
                batches = _distinct(selected, _shape("batch"))
                of = {(row.provider, row.shapes["batch"]): row for row in selected}
                ratios = [of["table_wise", batch].p50 / of["data_parallel", batch].p50 for batch in batches]
                panel.loglog(batches, ratios, color=f"C{k}", label=f"rank {rank}")
                for batch, ratio in zip(batches, ratios, strict=True):
                    copies = set(of["TTShardingPlanner", batch].counted) == {"data_parallel"}
                    panel.plot(batch, ratio, "o", markersize=5, color=f"C{k}", markerfacecolor=f"C{k}" if copies else "white")
            panel.axhline(1, color="black", linestyle="--", linewidth=1)
            panel.set_title(f"{count} GPUs, dim {dim}", fontsize=9)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("table-wise / data-parallel")
    _label_batches(axes[-1])
    return figure


def _label_batches(panels: Sequence[Any]) -> None:
    for panel in panels:
        panel.set_xlabel("samples per GPU")
        panel.xaxis.set_minor_formatter(NullFormatter())


def _distinct(rows: Sequence[Row], of: Callable[[Row], Any]) -> list[Any]:
    return list(dict.fromkeys(of(row) for row in rows))


def _shape(size: str) -> Callable[[Row], Any]:
    return lambda row: row.shapes[size]


def _provider(row: Row) -> str:
    return row.provider


def _sum(row: Row, prefix: str) -> float:
    return sum(value for key, value in row.counted.items() if key.startswith(prefix))


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    return [[row.p50 - row.p20 for row in rows], [row.p80 - row.p50 for row in rows]]
