"""Writes the tables of README and docs from committed rows: `python -m benchmarks.pages [--check]`.

A page names a table in a comment; the lines between it and the closing comment are generated:

    <!-- table lookup -->
    | TT tables | FBGEMM | ours |
    ...
    <!-- end of table -->
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from benchmarks import quality_tables, tables
from benchmarks.tables import RESULTS
from comera_rec.cli.errors import run_command
from data_pipeline.errors import UserError

ROOT = RESULTS.parents[1]
TABLES: dict[str, Callable[[], str]] = {
    "whole-model": tables.whole_model,
    "kaggle-model": tables.kaggle_model,
    "lookup": partial(tables.lookup, tables.XEON),
    "lookup-avx2": partial(tables.lookup, tables.EPYC_AVX2),
    "lookup-by-batch": tables.lookup_by_batch,
    "lookup-gpu": tables.lookup_on_gpu,
    "linear": tables.linear,
    "transformer": tables.transformer,
    "step": tables.step,
    "mlperf": tables.mlperf,
    "serve": tables.serve,
    "serve-http": tables.serve_http,
    "preprocess": partial(tables.preprocess, tables.EPYC_AVX2),
    "preprocess-avx512": partial(tables.preprocess, tables.EPYC_AVX512),
    "days": tables.days,
    "preprocess-order": tables.preprocess_by_order,
    "equal-bytes": quality_tables.equal_bytes,
    "quality-ne": partial(quality_tables.quality, "ne"),
    "quality-auc": partial(quality_tables.quality, "auc"),
    "quality-types": quality_tables.quality_of_dtypes,
    "quality-meaning": quality_tables.quality_with_meaning,
    "quality-rounded": quality_tables.quality_of_rounded,
    "quality-groups": quality_tables.quality_with_groups,
    "quality-converted": quality_tables.quality_of_converted,
    "quality-decays": quality_tables.quality_of_decays,
}
_BLOCK = re.compile(r"(?m)^<!-- table (\S+) -->\n(?:.*\n)*?<!-- end of table -->$")


def filled(page: Path) -> str:
    """Return a page's text with tables generated from the rows.

    Raises:
        ValueError: for a name that is not a table's.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise UserError(f"{page} asks for an unknown table {name!r}: choose one of {', '.join(TABLES)}")
        text = TABLES[name]().replace("](results/", f"]({os.path.relpath(RESULTS, page.parent)}/")
        return f"<!-- table {name} -->\n{text}\n<!-- end of table -->"

    return _BLOCK.sub(block, page.read_text())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Change nothing; fail if a table differs from its rows.")
def fill(check: bool) -> None:
    """Write the tables of README and docs from the rows under benchmarks/results.

    \b
    Example:
      python -m benchmarks.pages
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    stale = {page: text for page in pages if (text := filled(page)) != page.read_text()}
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if names and check:
        raise UserError(f"{names} differ from their rows: run python -m benchmarks.pages")
    for page, text in stale.items():
        page.write_text(text)
    click.echo(f"wrote {names}" if names else "all tables match their rows")


if __name__ == "__main__":
    run_command(fill, "python -m benchmarks.pages")
