"""The subcommand `comera score`, on an exported model; it needs torch, but neither TorchRec nor a checkpoint."""

import time
from pathlib import Path
from typing import Any

import click

from comera_rec.cli.errors import tell
from comera_rec.serving.score import ScoreOptions
from comera_rec.serving.score import score as write_scores
from data_pipeline.sources import source

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--model", type=_PATH, required=True, metavar="MODEL.pt2", help="A file that `comera export` wrote.")
@click.option("--input", "target", required=True, metavar="LOG|DATA", help="A raw log, gzipped or not, or a data set's folder.")
@click.option("--output", type=_PATH, required=True, metavar="SCORES", help="The Parquet file to write.")
@click.option("--data", type=_PATH, help="Data set whose vocabularies encode a log; default the one that the model was trained on.")
@click.option("--split", default="test", help="Split of a data set: train, val or test.")
@click.option("--max-bad-rows", default=0, help="Most malformed lines to drop before the run stops.")
@click.option("--workers", type=int, metavar="N", help="Processes; default one per core.")
@click.option("--overwrite", is_flag=True, help="Replace a finished file.")
def score(target: str, output: Path, **chosen: Any) -> None:
    """Write the probability of a click for every line of a log, or every row of a data set's split, in order.

    The file has columns line (from 1) or row (from 0), score, and label where there are labels. An interrupted run resumes when
    the same command is given again.

    \b
    Example:
      comera score --model model.pt2 --input today.gz --output scores.parquet
    """
    options = ScoreOptions(inputs=(source(target),), output=output, **chosen)
    start = time.perf_counter()
    scores = write_scores(options, tell=tell)
    seconds = time.perf_counter() - start
    click.echo(f"wrote {output}: {scores:,} scores in {seconds:.1f} s ({scores / seconds:,.0f} rows/s)")
