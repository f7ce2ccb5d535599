"""Prints means and standard deviations over seeds: `python -m benchmarks.quality.summary RESULTS.jsonl`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.rows import Row, read_rows, select
from benchmarks.quality.runs import chosen
from benchmarks.tables import markdown, spread


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


if __name__ == "__main__":
    print(quality_table(read_rows(Path(sys.argv[1]))))
