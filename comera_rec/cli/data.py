"""`comera synth` and `comera preprocess`: logs with a planted signal, and raw logs to a data set. Neither needs torch."""

from __future__ import annotations

import time
from pathlib import Path

import click

from data_pipeline.manifest import Manifest
from data_pipeline.preprocess import PreprocessOptions
from data_pipeline.preprocess import preprocess as write_data_set
from data_pipeline.synth import SynthOptions, truth_path
from data_pipeline.synth import synth as write_log

_PATH = click.Path(path_type=Path)


@click.command(short_help="Write Criteo-format logs with a planted signal of known best AUC.")
@click.option("--rows", type=int, required=True, help="Lines to write.")
@click.option("--output", type=_PATH, required=True, metavar="RAW", help="The log; a name ending in .gz compresses it.")
@click.option("--seed", default=0, show_default=True, help="Of the planted model and of the draws.")
@click.option("--scale", default=1.0, show_default=True, help="Factor on the cardinalities of the Kaggle log.")
@click.option("--overwrite", is_flag=True, help="Replace an existing log.")
def synth(rows: int, output: Path, seed: int, scale: float, overwrite: bool) -> None:
    """Write logs in Criteo's format from a planted model, and the best reachable scores beside them.

    Values are distributed like those of the Kaggle log. Labels follow main effects and pairs of hidden vectors, so what the true
    probabilities reach on them bounds every model; that goes to RAW's stem with .truth.json.

    \b
    Example:
      comera synth --rows 500000 --scale 0.05 --output raw/train.txt
    """
    start = time.perf_counter()
    truth = write_log(SynthOptions(rows=rows, output=output, seed=seed, scale=scale, overwrite=overwrite))
    seconds = time.perf_counter() - start
    for name, score in (("all rows", truth.whole), ("last tenth", truth.last_tenth)):
        if score and score.best_auc and score.best_ne:
            click.echo(
                f"best reachable on {name}: AUC {score.best_auc:.4f}, logloss {score.best_logloss:.4f}, NE {score.best_ne:.4f}"
                f" (label rate {score.label_rate:.4f})"
            )
    click.echo(f"wrote {output} and {truth_path(output).name} in {seconds:.1f} s ({rows / seconds:,.0f} rows/s)")


@click.command(short_help="Turn Criteo logs into Parquet shards and a manifest.")
@click.option(
    "--input", "first_inputs", type=_PATH, multiple=True, required=True, metavar="RAW [RAW ...]", help="Logs in time order."
)
@click.argument("more_inputs", type=_PATH, nargs=-1, metavar="")
@click.option("--output", type=_PATH, required=True, metavar="DATA", help="Folder of the data set, new or empty.")
@click.option(
    "--min-count", default=2, show_default=True, help="Training rows a category value needs for an id of its own; others are 0."
)
@click.option("--val-fraction", default=0.1, show_default=True, help="Share of the rows before the test rows, for validation.")
@click.option("--test-fraction", default=0.1, show_default=True, help="Share of the rows, the last ones, for the test.")
@click.option("--rows-per-shard", default=1 << 18, show_default=True, help="Rows of a Parquet file.")
@click.option("--max-bad-rows", default=0, show_default=True, help="Malformed lines that may be dropped before the run stops.")
@click.option("--overwrite", is_flag=True, help="Replace a finished data set.")
def preprocess(
    first_inputs: tuple[Path, ...],
    more_inputs: tuple[Path, ...],
    output: Path,
    min_count: int,
    val_fraction: float,
    test_fraction: float,
    rows_per_shard: int,
    max_bad_rows: int,
    overwrite: bool,
) -> None:
    """Turn Criteo logs (plain or .gz, with or without label) into Parquet shards and manifest.json.

    The rows are split in their order into train, val and test. Ids are ordered by frequency in the training split, 0 standing for
    missing and rare values; counts become log(x + offset), 0.0 standing for missing.

    \b
    Example:
      comera preprocess --input day_*.gz --output data/ --max-bad-rows 100
    """
    if len(first_inputs) > 1 and more_inputs:
        raise ValueError("--input is given several times, once with several files; name all files after one --input")
    start = time.perf_counter()
    options = PreprocessOptions(
        inputs=first_inputs + more_inputs,
        output=output,
        min_count=min_count,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        rows_per_shard=rows_per_shard,
        max_bad_rows=max_bad_rows,
        overwrite=overwrite,
    )
    manifest = write_data_set(options)
    click.echo(_summary(manifest, output, time.perf_counter() - start))


def _summary(manifest: Manifest, output: Path, seconds: float) -> str:
    rows = manifest.rows
    lines = [
        f"rows: {rows.read:,} read, {rows.written:,} written, {rows.rejected:,} rejected",
        "splits: " + ", ".join(f"{name} {split.rows:,}" for name, split in manifest.splits.items()),
        "label mean: " + (f"{manifest.label.mean:.4f}" if manifest.label else "no label"),
        f"embedding rows: {sum(column.num_embeddings for column in manifest.categorical_columns):,}",
        f"wrote {output} in {seconds:.1f} s ({rows.read / seconds:,.0f} rows/s)",
    ]
    lines[1:1] = [f"  rejected {line.file}:{line.line}: {line.reason}" for line in manifest.rejected_lines[:5]]
    return "\n".join(lines)
