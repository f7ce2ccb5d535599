"""The subcommand `comera score`, on an exported model; it needs torch, but neither TorchRec nor a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import click

from comera_rec.cli.errors import with_options
from comera_rec.serving.score import ScoreOptions
from comera_rec.serving.score import score as write_scores
from data_pipeline.sources import source

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--model", type=_PATH, required=True, metavar="MODEL.pt2", help="A file that `comera export` wrote.")
@click.option("--input", "target", required=True, metavar="LOG|DATA", help="A raw log, gzipped or not, or a data set's folder.")
@click.option("--output", type=_PATH, required=True, metavar="SCORES", help="The Parquet file to write.")
@click.option("--data", type=_PATH, help="Data set whose vocabularies encode a log; default the one that the model was trained on.")
@click.option("--split", default="test", show_default=True, help="Split of a data set: train, val or test.")
@click.option("--max-bad-rows", default=0, show_default=True, help="Most malformed lines to drop before the run stops.")
@click.option("--workers", type=int, metavar="N", help="Processes; default one per core.")
@click.option("--overwrite", is_flag=True, help="Replace a finished file.")
def score(
    model: Path, target: str, output: Path, data: Path | None, split: str, max_bad_rows: int, workers: int | None, overwrite: bool
) -> None:
    """Write the probability of a click for every line of a log, or every row of a data set's split, in order.

    The file has columns line (from 1) or row (from 0), score, and label where there are labels. An interrupted run resumes when
    the same command is given again.

    \b
    Example:
      comera score --model model.pt2 --input today.gz --output scores.parquet
    """
    options = ScoreOptions(
        model=model, inputs=(source(target),), output=output, data=data, split=split, max_bad_rows=max_bad_rows,
        workers=workers, overwrite=overwrite,
    )  # fmt: skip
    start = time.perf_counter()
    written = write_scores(options, tell=lambda line: click.echo(with_options(line), err=True))
    seconds = time.perf_counter() - start
    click.echo(f"wrote {output}: {written.rows:,} scores in {seconds:.1f} s ({written.rows_per_second:,.0f} rows/s once loaded)")
