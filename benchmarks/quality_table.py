"""NE of the quality benchmark, mean and standard deviation over seeds: `python -m benchmarks.quality_table RESULTS.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import click

from benchmarks.cli import run_command
from benchmarks.quality import chosen
from benchmarks.rows import Row, read_rows


def quality_table(rows: Sequence[Row]) -> str:
    """Markdown, a table for each data set and number of steps: a line for each method, a column for each compression."""
    tables = []
    for data, steps in dict.fromkeys((row.shapes["data"], row.shapes["steps"]) for row in rows):
        mine = chosen([row for row in rows if (row.shapes["data"], row.shapes["steps"]) == (data, steps)])
        sizes = sorted({row.shapes["compression"] for row in mine})
        lines = [[f"{data}, {steps} steps", *(f"{size:g}x" for size in sizes)], ["---", *["---:"] * len(sizes)]]
        for method in dict.fromkeys(row.provider for row in mine):
            cells = [[r.p50 for r in mine if (r.provider, r.shapes["compression"]) == (method, size)] for size in sizes]
            lines.append([method, *map(_cell, cells)])
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)


def _cell(nes: Sequence[float]) -> str:
    return "" if not nes else f"{mean(nes):.4f}" if len(nes) == 1 else f"{mean(nes):.4f} ± {stdev(nes):.4f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def table(results: Path) -> None:
    """Print the runs that each method has chosen, mean and standard deviation over seeds.

    \b
    Example:
      python -m benchmarks.quality_table quality.jsonl
    """
    click.echo(quality_table(read_rows(results)))


if __name__ == "__main__":
    run_command(table, "benchmarks.quality_table")
