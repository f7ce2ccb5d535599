"""The subcommand that compares runs; it needs no torch."""

import json
from pathlib import Path

import click

from comera_rec.report import read_runs, require_summary, summary_table, write_report, write_summary
from data_pipeline.atomic import require_page
from data_pipeline.errors import UserError


@click.command()
@click.option(
    "--run",
    "runs",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Folder of a run; repeat it to compare several.",
)
@click.option("--output", type=click.Path(path_type=Path), help="The HTML page; default report.html in the first run's folder.")
@click.option(
    "--truth",
    type=click.Path(path_type=Path),
    help="The file that `comera synth` wrote beside its log; adds the best AUC possible on its last tenth, the default test split.",
)
def report(runs: tuple[Path, ...], output: Path | None, truth: Path | None) -> None:
    """Compare runs on one self-contained HTML page, and print the comparison.

    summary.json is written beside the page.

    \b
    Example:
      comera report --run runs/dense --run runs/compressed --output report.html
    """
    page = output or runs[0] / "report.html"
    summary = page.with_name("summary.json")
    require_page(page)
    require_summary(summary)
    best_auc = None if truth is None else _best_auc(truth)
    read = read_runs(runs)
    write_report(read, page, best_auc=best_auc)
    write_summary(read, summary)
    click.echo(summary_table(read))
    if best_auc is not None:
        click.echo(f"best reachable AUC on the last tenth of the log: {best_auc:.4f}")
    click.echo(f"wrote {page}")


def _best_auc(truth: Path) -> float:
    try:
        return float(json.loads(truth.read_text())["last_tenth"]["best_auc"])
    except FileNotFoundError:
        raise UserError(f"--truth {truth} does not exist: give the .truth.json that `comera synth` wrote beside its log") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--truth {truth} is not what `comera synth` wrote beside its log: give its .truth.json") from None
