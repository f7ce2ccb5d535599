"""Reads committed rows and formats them as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from benchmarks.harness.rows import Row, read_rows

RESULTS = Path(__file__).parents[1] / "results"
XEON, EPYC = "cpu-2-intel-xeon-processor-avx512", "cpu-2-amd-epyc"
EPYC_AVX2, EPYC_AVX512 = "cpu-2-amd-epyc-avx2", "cpu-2-amd-epyc-avx512"
MACHINES = {
    XEON: "2 cores of an Intel Xeon with AVX-512",
    EPYC: "2 cores of an AMD EPYC",
    EPYC_AVX2: "2 cores of an AMD EPYC with AVX2",
    EPYC_AVX512: "2 cores of an AMD EPYC with AVX-512",
}
OURS = "TTEmbeddingBagCollection, updated in backward"


@cache
def committed(machine: str, benchmark: str) -> list[Row]:
    return read_rows(RESULTS / machine / f"{benchmark}.jsonl")


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a table whose first `left` columns are flush left."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def source(machine: str, benchmark: str, command: str = "") -> str:
    """Format the line below a table: hardware, versions, the command, and a link to its rows."""
    versions = sorted({row.versions["torch"] for row in committed(machine, benchmark)})
    return (
        f"\n\n{MACHINES[machine]} (virtual), torch {', '.join(versions)}; "
        f"`python -m benchmarks.run {command or benchmark}`, [rows](results/{machine}/{benchmark}.jsonl)."
    )


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Format mean and standard deviation, or a single value."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
