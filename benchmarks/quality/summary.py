"""Prints tables of the quality benchmark: `python -m benchmarks.quality.summary RESULTS.jsonl [--short]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click

from benchmarks.harness.cli import run_command
from benchmarks.harness.rows import Row, read_rows
from benchmarks.quality.runs import SEEDS, VARIANTS, chosen

METRICS: dict[str, Callable[[Row], float]] = {
    "ne": lambda row: row.p50,
    "auc": lambda row: row.counted["auc"],
    "val_ne": lambda row: row.counted["val_ne"],
}
BEST: dict[str, Any] = {"ne": min, "auc": max, "val_ne": min}
DATA_SETS = {
    "synth": "a million synthetic Criteo rows, Kaggle's cardinalities",
    "ml1m": "MovieLens-1M, implicit feedback",
    "video": "Amazon video games, implicit feedback, users' last item, 31,000 x 24,000",
}
NAMES = {
    "TT + rows": "TT with hot rows",
    "TT + rows adaptive": "the same, ranks and widths adapted to the budget",
    "TT fixed": "TT, one rank",
    "TT adaptive": "TT, ranks adapted",
    "TT SVD": "TT-SVD after half of the steps",
    "mixed dim": "mixed dimensions",
    "CAFE": "rows of hot ids, hashing for others (CAFE)",
    "QR": "quotient-remainder",
    "QR in parts": "quotient-remainder in parts",
    "DHE": "an MLP over hashes (DHE)",
    "MGQE": "product quantization (MGQE)",
    "CCE": "clustered codes (CCE), codes not counted",
    "PEP": "learned thresholds (PEP)",
    "pruning": "magnitude pruning",
}
"""Names of methods in the short tables, in order; other methods follow under their own names."""
NOT_EQUAL = ("CCE",)  # its budget leaves out the bytes of the codes


def quality_table(rows: Sequence[Row]) -> str:
    """Format a Markdown table for each data set and number of steps: a line per method, a column per compression."""
    tables = []
    for data, steps in dict.fromkeys((row.shapes["data"], row.shapes["steps"]) for row in rows):
        selected = chosen([row for row in rows if (row.shapes["data"], row.shapes["steps"]) == (data, steps)])
        sizes = sorted({row.shapes["compression"] for row in selected})
        lines = [[f"{data}, {steps} steps", *(f"{size:g}x" for size in sizes)], ["---", *["---:"] * len(sizes)]]
        for method in dict.fromkeys(row.provider for row in selected):
            cells = [[r.p50 for r in selected if (r.provider, r.shapes["compression"]) == (method, size)] for size in sizes]
            lines.append([method, *map(_cell, cells)])
        tables.append(_markdown(lines))
    return "\n\n".join(tables)


def short_table(rows: Sequence[Row], metric: str) -> str:
    """Format one Markdown table of means for all data sets; the best at equal bytes is bold, the dense model's is in the title."""
    rows = [row for row in chosen(rows) if row.provider not in VARIANTS]
    sizes = sorted({row.shapes["compression"] for row in rows})
    lines = [["", *(f"{size:g}x" for size in sizes)], ["---", *["---:"] * len(sizes)]]
    for data in dict.fromkeys(row.shapes["data"] for row in rows):
        means: dict[str, dict[float, float]] = {}
        for method in dict.fromkeys(["dense", *NAMES, *(row.provider for row in rows)]):
            selected = [row for row in rows if (row.shapes["data"], row.provider) == (data, method)]
            by_size = {size: [METRICS[metric](r) for r in selected if r.shapes["compression"] == size] for size in sizes}
            means[method] = {size: mean(values) for size, values in by_size.items() if len(values) == SEEDS}
        dense = means.pop("dense").values()
        lines.append([f"{DATA_SETS.get(data, data)}{''.join(f'; dense {value:.4f}' for value in dense)}", *[""] * len(sizes)])
        cells = {method: {size: f"{value:.4f}" for size, value in by_size.items()} for method, by_size in means.items() if by_size}
        equal = [row for method, row in cells.items() if method not in NOT_EQUAL]
        best = {size: BEST[metric]([row[size] for row in equal if size in row], default="") for size in sizes}
        for method, row in cells.items():
            bold = [row in equal and row.get(size) == best[size] for size in sizes]
            marks = [f"**{row[size]}**" if is_best else row.get(size, "") for size, is_best in zip(sizes, bold, strict=True)]
            lines.append([NAMES.get(method, method), *marks])
    return _markdown(lines)


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(nes: Sequence[float]) -> str:
    return "" if not nes else f"{mean(nes):.4f}" if len(nes) == 1 else f"{mean(nes):.4f} ± {stdev(nes):.4f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--short", type=click.Choice(list(METRICS)), help="One table of means for all data sets, as in the README.")
@click.option("--data", help="Only this data set.")
def table(results: Path, short: str | None, data: str | None) -> None:
    """Print mean and standard deviation over seeds of each method's runs at the rate that it chose.

    \b
    Example:
      python -m benchmarks.quality.summary quality.jsonl
      python -m benchmarks.quality.summary quality.jsonl --short auc --data video
    """
    rows = [row for row in read_rows(results) if data in (None, row.shapes["data"])]
    if not rows:
        raise ValueError(f"{results} has no rows of data set {data!r}: name another, or leave out --data")
    click.echo(short_table(rows, short) if short else quality_table(rows))


if __name__ == "__main__":
    run_command(table, "benchmarks.quality.summary")
