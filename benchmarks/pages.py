"""Writes the tables and figures of README and docs from committed rows: `python -m benchmarks.pages [--check]`.

The figure is a PNG under benchmarks/results that keeps the hash of its rows. A page names a table in a comment; the lines between
it and the closing comment are generated:

    <!-- table lookup -->
    | TT tables | FBGEMM | ours |
    ...
    <!-- end of table -->
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from PIL import Image

from benchmarks import quality_tables, tables
from benchmarks.harness.cli import run_command
from benchmarks.harness.rows import read_rows
from benchmarks.quality.figure import save_figure
from benchmarks.tables import RESULTS
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
FIGURE = RESULTS / "quality.png"
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


def pages() -> list[Path]:
    """Paths of README and of all pages in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
    files = sorted(RESULTS.glob("*/quality.jsonl"))
    rows = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    is_drawn = FIGURE.exists() and _source(FIGURE) == rows
    names = ", ".join(str(path.relative_to(ROOT)) for path in (*stale, *([] if is_drawn else [FIGURE])))
    if names and check:
        raise UserError(f"{names} differ from their rows: run python -m benchmarks.pages")
    for page, text in stale.items():
        page.write_text(text)
    if not is_drawn:
        save_figure([row for file in files for row in read_rows(file)], FIGURE, source=rows)
    click.echo(f"wrote {names}" if names else "all tables and figures match their rows")


if __name__ == "__main__":
    run_command(fill, "benchmarks.pages")
