"""Prints tables of the quality benchmark: `python -m benchmarks.quality.summary RESULTS.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.harness.cli import run_command
from benchmarks.harness.rows import Row, read_rows, select
from benchmarks.quality.runs import chosen
from benchmarks.tables import markdown, spread
from data_pipeline.errors import UserError


def quality_table(rows: Sequence[Row]) -> str:
    """Format a Markdown table for each data set and number of steps: a line per method, a column per compression."""
    tables = []
    for data, steps in dict.fromkeys((row.shapes["data"], row.shapes["steps"]) for row in rows):
        selected = chosen(select(rows, data=data, steps=steps))
        sizes = sorted({row.shapes["compression"] for row in selected})
        lines = []
        for method in dict.fromkeys(row.provider for row in selected):
            cells = [[row.p50 for row in select(selected, provider=method, compression=size)] for size in sizes]
            lines.append([method, *(spread(nes) if nes else "" for nes in cells)])
        tables.append(markdown([f"{data}, {steps} steps", *(f"{size:g}x" for size in sizes)], lines))
    return "\n\n".join(tables)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--data", help="Only this data set.")
def table(results: Path, data: str | None) -> None:
    """Print mean and standard deviation over seeds of each method's runs at the rate that it chose.

    \b
    Example:
      python -m benchmarks.quality.summary quality.jsonl --data video
    """
    rows = [row for row in read_rows(results) if data in (None, row.shapes["data"])]
    if not rows:
        raise UserError(f"{results} has no rows of data set {data!r}: name another, or leave out --data")
    click.echo(quality_table(rows))


if __name__ == "__main__":
    run_command(table, "benchmarks.quality.summary")
