"""Plot results: `python -m benchmarks.plot RESULTS.jsonl ... [--output FILE.svg]`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.harness.cli import run_command
from benchmarks.harness.rows import UNITS, Row, read_rows
from benchmarks.harness.text import case_title, format_size
from benchmarks.lookup.figure import sweep_figure
from benchmarks.quality.figure import quality_figure
from benchmarks.sharding.figure import grid_figure
from benchmarks.training.figure import dlrm_figure


def plot_rows(rows: Sequence[Row], path: Path, source: str = "") -> None:
    """Plot rows as PNG, SVG or PDF, by the file's suffix: lines for sweeps of a size, dots for separate cases.

    The file's metadata keep `source`.
    """
    if not rows:
        raise ValueError("there are no rows to plot: run the benchmark first")
    figure = FIGURES.get(rows[0].op, _dot_figure)(rows)
    title = textwrap.fill(f"{rows[0].op}: {_common(rows)}", width=int(13 * figure.get_figwidth()))
    first_rows = {row.machine: row for row in reversed(rows)}.values()  # of each machine
    threads = [f", {row.threads} thread{'s' * (row.threads > 1)}" * (row.threads > 0) for row in first_rows]
    runs = [f"{row.machine}{of_run}, commit {row.commit}" for row, of_run in zip(first_rows, threads, strict=True)]
    figure.suptitle("\n".join([title, *runs]), fontsize=9)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    with matplotlib.rc_context({"svg.hashsalt": "comera-rec"}):
        figure.savefig(path, dpi=120, metadata={"Source": source} if source else None)


def _memory_figure(rows: Sequence[Row]) -> Figure:
    """Plot peaks of whole runs and their limits, by kind of log."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    logs = sorted({row.shapes["log"] for row in rows})
    limits = sorted({row.shapes["limit_mib"] for row in rows})
    axes = figure.subplots()
    for number, limit in enumerate(limits):
        peaks = {row.shapes["log"]: row.p50 for row in rows if row.shapes["limit_mib"] == limit}
        offset = 0.8 * ((number + 0.5) / len(limits) - 0.5)
        heights = [logs.index(log) + offset for log in peaks]
        axes.barh(heights, list(peaks.values()), height=0.8 / len(limits), color=f"C{number}", label=f"limit {limit} MiB")
        axes.axvline(limit, color=f"C{number}", linestyle="--")
    axes.set_yticks(range(len(logs)), logs)
    axes.set_xlabel("peak memory, MiB; dashed lines are the limits")
    axes.grid(axis="x", alpha=0.3)
    return figure


FIGURES = {
    "lookup-scaling": sweep_figure,
    "quality": quality_figure,
    "preprocess-memory": _memory_figure,
    "dlrm": dlrm_figure,
    "sharding-grid": grid_figure,
}


def _dot_figure(rows: Sequence[Row]) -> Figure:
    """Plot one panel for each pass and unit, a line for each case, and a dot for each provider's median."""
    labels = _case_labels(rows)
    providers = list(dict.fromkeys(row.provider for row in rows))
    passes = list(dict.fromkeys(row.pass_ for row in rows))
    units = [unit for unit in UNITS if any(row.unit == unit for row in rows)]
    height = 1.5 + len(units) * (1.0 + 0.1 * len(labels) * max(4, len(providers)))
    figure = Figure(figsize=(3 + 0.06 * max(map(len, labels.values())) + 3.5 * len(passes), height), layout="constrained")
    axes = figure.subplots(len(units), len(passes), squeeze=False, sharey=True)
    for unit, line in zip(units, axes, strict=True):
        for pass_, panel in zip(passes, line, strict=True):
            chosen = [row for row in rows if row.unit == unit and row.pass_ == pass_]
            _draw(panel, chosen, labels, providers)
            panel.set_title(pass_)
            panel.set_xlabel(f"{unit} (p20, p50, p80)")
    return figure


def _constant_keys(rows: Sequence[Row]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row.shapes)
    return [key for key in keys if all(key in row.shapes and row.shapes[key] == rows[0].shapes[key] for row in rows)]


def _common(rows: Sequence[Row]) -> str:
    return ", ".join([*(f"{key} {format_size(rows[0].shapes[key])}" for key in _constant_keys(rows)), rows[0].dtype])


def _case_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Case's title -> what distinguishes the case from the others."""
    constant = _constant_keys(rows)
    return {
        case_title(row): ", ".join(f"{key} {format_size(value)}" for key, value in row.shapes.items() if key not in constant)
        for row in rows
    }


def _draw(panel: Any, rows: Sequence[Row], labels: Mapping[str, str], providers: Sequence[str]) -> None:
    titles = list(labels)
    for k, name in enumerate(providers):
        mine = [row for row in rows if row.provider == name]
        offset = 0.7 * ((k + 0.5) / len(providers) - 0.5)
        medians = [row.p50 for row in mine]
        spread = [[row.p50 - row.p20 for row in mine], [row.p80 - row.p50 for row in mine]]
        heights = [titles.index(case_title(row)) + offset for row in mine]
        panel.errorbar(medians, heights, xerr=spread, fmt="o", markersize=4, color=f"C{k}", label=name)
    if any(row.p50 > 0 for row in rows):
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(titles)), list(labels.values()), fontsize=7)
    panel.set_ylim(len(titles) - 0.5, -0.5)
    panel.grid(axis="x", alpha=0.3)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="PNG, SVG or PDF; default beside RESULTS as .svg.")
def plot(results: Sequence[Path], output: Path | None) -> None:
    """Plot the rows of one or more results files of a benchmark.

    \b
    Example:
      python -m benchmarks.plot lookup.jsonl --output lookup.png
    """
    output = output or results[0].with_suffix(".svg")
    plot_rows([row for path in results for row in read_rows(path)], output)
    click.echo(f"wrote {output}")


if __name__ == "__main__":
    run_command(plot, "benchmarks.plot")
