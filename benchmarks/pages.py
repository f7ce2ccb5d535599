"""Writes the tables and figures of README and docs from committed rows: `python -m benchmarks.pages [--check]`.

A figure is a PNG under benchmarks/results that keeps the hash of its rows. A page names a table of `page_tables` in a comment; the
lines between it and the closing comment are generated:

    <!-- table lookup -->
    | TT tables | FBGEMM | ours |
    ...
    <!-- end of table -->
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import click
from PIL import Image

from benchmarks.harness.cli import run_command
from benchmarks.harness.rows import read_rows
from benchmarks.page_tables import TABLES
from benchmarks.page_tables.rows import RESULTS
from benchmarks.plot import plot_rows

ROOT = RESULTS.parents[1]
FIGURES = {
    "quality.png": "*/quality.jsonl",
    "cpu-2-amd-epyc-avx512/dlrm.png": "cpu-2-amd-epyc-avx512/dlrm.jsonl",
    "cpu-2-intel-xeon-processor-avx512/lookup-scaling.png": "cpu-2-intel-xeon-processor-avx512/lookup-scaling.jsonl",
    "cpu-2-amd-epyc/sharding-grid.png": "cpu-2-amd-epyc/sharding-grid.jsonl",
    "cpu-2-amd-epyc-avx2/preprocess-memory.png": "cpu-2-amd-epyc-avx2/preprocess-memory.jsonl",
}
"""Figure -> the files of its rows."""
_BLOCK = re.compile(r"(?m)^<!-- table (\S+) -->\n(?:.*\n)*?<!-- end of table -->$")


def filled(page: Path) -> str:
    """Return a page's text with tables generated from the rows.

    Raises:
        ValueError: for a name that is not a table's.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"{page} asks for an unknown table {name!r}: choose one of {', '.join(TABLES)}")
        text = TABLES[name]().replace("](results/", f"]({os.path.relpath(RESULTS, page.parent)}/")
        return f"<!-- table {name} -->\n{text}\n<!-- end of table -->"

    return _BLOCK.sub(block, page.read_text())


def pages() -> list[Path]:
    """Paths of README and of all pages in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stale_figures() -> dict[Path, tuple[list[Path], str]]:
    """Figures that weren't drawn from today's rows -> the rows' files, and their hash."""
    stale = {}
    for name, pattern in FIGURES.items():
        path, files = RESULTS / name, sorted(RESULTS.glob(pattern))
        source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        if not path.exists() or _source(path) != source:
            stale[path] = files, source
    return stale


def _source(figure: Path) -> str | None:
    with Image.open(figure) as image:
        return image.info.get("Source")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Change nothing; fail if a table or figure differs from its rows.")
def fill(check: bool) -> None:
    """Write the tables and figures of README and docs from the rows under benchmarks/results.

    \b
    Example:
      python -m benchmarks.pages
    """
    stale = {page: text for page in pages() if (text := filled(page)) != page.read_text()}
    figures = stale_figures()
    names = ", ".join(str(path.relative_to(ROOT)) for path in (*stale, *figures))
    if names and check:
        raise ValueError(f"{names} differ from their rows: run python -m benchmarks.pages")
    for page, text in stale.items():
        page.write_text(text)
    for path, (files, source) in figures.items():
        plot_rows([row for file in files for row in read_rows(file)], path, source)
    click.echo(f"wrote {names}" if names else "all tables and figures match their rows")


if __name__ == "__main__":
    run_command(fill, "benchmarks.pages")
