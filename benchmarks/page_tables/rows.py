"""Committed rows, and Markdown of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.rows import Row, read_rows

RESULTS = Path(__file__).parents[1] / "results"
XEON, EPYC, EPYC_AVX2 = "cpu-2-intel-xeon-processor-avx512", "cpu-2-amd-epyc", "cpu-2-amd-epyc-avx2"
MACHINES = {
    XEON: "2 cores of an Intel Xeon with AVX-512",
    EPYC: "2 cores of an AMD EPYC",
    EPYC_AVX2: "2 cores of an AMD EPYC with AVX2",
}
OURS = "TTEmbeddingBagCollection, updated in backward"


@cache
def committed(machine: str, benchmark: str) -> list[Row]:
    return read_rows(RESULTS / machine / f"{benchmark}.jsonl")


def select(measured: Sequence[Row], /, *, provider: str = "", pass_: str = "", unit: str = "", **sizes: Any) -> list[Row]:
    """Rows of a provider, pass, unit and sizes."""
    wanted = {"provider": provider, "pass_": pass_, "unit": unit}
    return [
        row
        for row in measured
        if all(getattr(row, name) == value for name, value in wanted.items() if value)
        and all(row.shapes.get(name) == value for name, value in sizes.items())
    ]


def one(measured: Sequence[Row], /, **wanted: Any) -> Row:
    (row,) = select(measured, **wanted)
    return row


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are flush left."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def source(machine: str, benchmark: str, command: str = "") -> str:
    """The line below a table: hardware, versions, the command and its rows."""
    versions = sorted({row.versions["torch"] for row in committed(machine, benchmark)})
    return (
        f"\n\n{MACHINES[machine]} (virtual), torch {', '.join(versions)}; "
        f"`python -m benchmarks.run {command or benchmark}`, [rows](results/{machine}/{benchmark}.jsonl)."
    )


def short(value: float) -> str:
    """Three digits, or all of a longer number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float], digits: int = 4) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
