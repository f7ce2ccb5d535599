"""Writes the tables of README and docs from committed rows: `python -m benchmarks.pages [--check]`.

A page names a table of `page_tables` in a comment; the lines between it and the closing comment are generated:

    <!-- table lookup -->
    | TT tables | FBGEMM | ours |
    ...
    <!-- end of table -->
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from benchmarks.harness.cli import run_command
from benchmarks.page_tables import TABLES
from benchmarks.page_tables.rows import RESULTS

ROOT = RESULTS.parents[1]
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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Change nothing; fail if a table differs from its rows.")
def fill(check: bool) -> None:
    """Write the tables of README and docs from the rows under benchmarks/results.

    \b
    Example:
      python -m benchmarks.pages
    """
    stale = {page: text for page in pages() if (text := filled(page)) != page.read_text()}
    names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
    if stale and check:
        raise ValueError(f"tables differ from their rows in {names}: run python -m benchmarks.pages")
    for page, text in stale.items():
        page.write_text(text)
    click.echo(f"wrote {names}" if stale else "all tables match their rows")


if __name__ == "__main__":
    run_command(fill, "benchmarks.pages")
