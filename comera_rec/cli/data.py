"""Commands on logs and data sets, without torch: `synth`, `preprocess`, `transform`, `verify`, `inspect`."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from comera_rec.cli.errors import tell
from data_pipeline.errors import UserError
from data_pipeline.inspection import to_text
from data_pipeline.manifest import SPLITS, CategoricalColumn, Manifest, Order, files_of, read_manifest
from data_pipeline.manifest import verify as verify_data_set
from data_pipeline.options import PreprocessOptions, format_bytes, parse_bytes
from data_pipeline.planted import DECAY
from data_pipeline.preprocess import preprocess as write_data_set
from data_pipeline.schema import read_schema
from data_pipeline.sources import Source, by_number, expand
from data_pipeline.splits import SplitKind
from data_pipeline.synth import SynthOptions, truth_path
from data_pipeline.synth import synth as write_log
from data_pipeline.transform import TransformOptions
from data_pipeline.transform import transform as transform_logs

_PATH = click.Path(path_type=Path)
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Parsed(click.ParamType):
    """Text that a function parses; its ValueError is a mistake of the user."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _seconds(text: str) -> float:
    """Convert an ISO 8601 date or time, in UTC unless it has a zone, to seconds since 1970; numbers stay as they are."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"{text!r} is not a time; write it like 2026-01-31 or 2026-01-31T12:00") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


BYTES = Parsed("SIZE", parse_bytes)
TIME = Parsed("TIME", _seconds)


@click.command()
@click.option("--rows", type=int, required=True, help="Lines to write.")
@click.option("--output", type=_PATH, required=True, metavar="RAW", help="The log; a name ending in .gz compresses it.")
@click.option(
    "--seed", default=0, help="Seed of the planted model, its values and its rows: logs of different seeds share no values."
)
@click.option("--scale", default=1.0, help="Factor on the cardinalities of the Kaggle log.")
@click.option("--decay", default=DECAY, help="How fast effects shrink with a value's rarity; with 0 they don't.")
@click.option("--groups", default=0.0, help="How much values that occur together have in common, from 0 to 1.")
@click.option("--overwrite", is_flag=True, help="Replace an existing log.")
def synth(rows: int, output: Path, **chosen: Any) -> None:
    """Write logs in Criteo's format from a planted model, and the best reachable scores beside them.

    Values are distributed like those of the Kaggle log. Labels are drawn from main effects and pairs of hidden vectors. The scores
    of the true probabilities, which no model can beat, are written to RAW's stem with .truth.json.

    \b
    Example:
      comera synth --rows 500000 --scale 0.05 --output raw/train.txt
    """
    start = time.perf_counter()
    truth = write_log(SynthOptions(rows=rows, output=output, **chosen))
    seconds = time.perf_counter() - start
    line = "best reachable on {}: AUC {best_auc:.4f}, logloss {best_logloss:.4f}, NE {best_ne:.4f} (label rate {label_rate:.4f})"
    for name, best in (("all rows", truth), ("last tenth", truth["last_tenth"])):
        if best and best["best_auc"] and best["best_ne"]:
            click.echo(line.format(name, **best))
    click.echo(f"wrote {output} and {truth_path(output).name} in {seconds:.1f} s ({rows / seconds:,.0f} rows/s)")


def _pass_options(command: _Command) -> _Command:
    """Add the options of every pass over logs, `PassOptions`; --output is the command's."""
    options = (
        click.option(
            "--input",
            "first_inputs",
            multiple=True,
            required=True,
            metavar="RAW [RAW ...]",
            help="Logs in time order: files, or URLs such as s3://bucket/day_*.gz.",
        ),
        click.argument("more_inputs", nargs=-1, metavar=""),
        click.option("--max-bad-rows", default=0, help="Most malformed lines to drop before the run stops."),
        click.option("--part-size", "part_bytes", type=BYTES, default="16MiB", help="Bytes of text in a part, the unit of work."),
        click.option("--memory-limit", type=BYTES, default="2GiB", help="Memory for the parts in work at once."),
        click.option("--workers", type=int, metavar="N", help="Threads; default one per core, if memory allows."),
        click.option(
            "--scheduler", metavar="ADDRESS|local", help="Work on a Dask cluster: tcp://host:8786, or processes on this machine."
        ),
        click.option("--overwrite", is_flag=True, help="Replace finished output."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _inputs(first: tuple[str, ...], more: tuple[str, ...]) -> tuple[Source, ...]:
    """Return the logs that --input names, in order."""
    if len(first) > 1 and more:
        raise UserError("--input is given several times, once with several files; name all files after one --input")
    sources = expand(first + more)
    inputs = by_number(sources)
    if inputs != sources:
        tell(f"reading the logs in the order of their numbers: {inputs[0]} ... {inputs[-1]}")
    return inputs


@click.command()
@_pass_options
@click.option("--output", type=_PATH, required=True, metavar="DATA", help="Folder of the data set, new or empty.")
@click.option("--schema", type=_PATH, metavar="FILE", help="TOML file that names the columns of logs other than Criteo's.")
@click.option(
    "--min-count",
    "min_counts",
    multiple=True,
    metavar="N|COLUMN=N",
    help="How often a category value must occur in training rows to get an id; rarer values are 0. Repeatable.  [default: 2]",
)
@click.option(
    "--order",
    type=click.Choice(get_args(Order)),
    default="frequency",
    help="Number values by frequency, or such that values which occur with the same others are neighbors, in bands of frequency.",
)
@click.option("--hash-buckets", type=int, metavar="N", help="Give ids 1..N-1 by hash, without vocabularies.")
@click.option(
    "--split",
    type=click.Choice(get_args(SplitKind)),
    default="chronological",
    help="In order; by file, halving the last one for validation and test; at random; or by a column of times.",
)
@click.option("--val-fraction", default=0.1, help="Share of the rows for validation, just before the test rows.")
@click.option("--test-fraction", default=0.1, help="Share of the rows for the test, at the end.")
@click.option("--seed", default=0, help="Seed of a split at random.")
@click.option("--val-from", type=TIME, metavar="TIME", help="Start of validation, by time: 2026-01-31T12:00 or a number.")
@click.option("--test-from", type=TIME, metavar="TIME", help="Start of the test, likewise.")
def preprocess(first_inputs: tuple[str, ...], more_inputs: tuple[str, ...], schema: Path | None, **chosen: Any) -> None:
    """Turn logs into Parquet shards and manifest.json: Criteo's, with or without label, or others by --schema.

    Logs are text, CSV, JSON lines or Parquet; text may be compressed by gzip, bzip2, xz or zstd.

    Ids are ordered by frequency in the training split, with 0 for missing and rare values; counts become log(x + offset), with 0.0
    for missing ones. An interrupted run resumes when the same command is given again.

    \b
    Example:
      comera preprocess --input day_*.gz --output data/ --split day --memory-limit 16GiB
    """
    start = time.perf_counter()
    options = PreprocessOptions(
        inputs=_inputs(first_inputs, more_inputs),
        schema=read_schema(schema) if schema else None,
        **_min_counts(chosen.pop("min_counts")),
        **chosen,
    )
    manifest = write_data_set(options, tell=tell)
    click.echo(_summary(manifest, options.output, time.perf_counter() - start))


@click.command()
@_pass_options
@click.option("--data", type=_PATH, required=True, help="The data set whose vocabularies to use.")
@click.option("--output", type=_PATH, required=True, metavar="NEWDATA", help="Folder of the new data set.")
@click.option(
    "--schema",
    type=_PATH,
    metavar="FILE",
    help="TOML file with the new logs' columns, if labels or ignored columns differ.",
)
@click.option(
    "--split",
    type=click.Choice(("source", *SPLITS)),
    default="source",
    help="Put all new rows in one split, or divide them as the data set's logs were.",
)
@click.option("--extend", is_flag=True, help="Give new values in training rows ids after the known ones.")
def transform(first_inputs: tuple[str, ...], more_inputs: tuple[str, ...], schema: Path | None, **chosen: Any) -> None:
    """Encode new logs with the vocabularies of a data set, for models that were trained on it.

    Values without an id in the data set become 0. By default new rows are divided like those of the data set, ready for training;
    `--split test` puts all of them in the test split, to evaluate yesterday's model on today's rows.

    \b
    Example:
      comera transform --data data/ --input today.gz --output today/
      comera evaluate --checkpoint runs/compressed --data today/
      comera transform --data data/ --input today.gz --extend --split train --output more/
    """
    start = time.perf_counter()
    inputs = _inputs(first_inputs, more_inputs)
    options = TransformOptions(inputs=inputs, schema=read_schema(schema) if schema else None, **chosen)
    manifest = transform_logs(options, tell=tell)
    click.echo(_summary(manifest, options.output, time.perf_counter() - start))
    if strange := _columns_of_new_values(manifest, read_manifest(options.data)):
        tell(
            f"most values of {', '.join(strange)} have no id in {options.data}, though most of its rows have one: "
            "check that both logs are from the same source"
        )


def _min_counts(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return min_count and min_counts from texts N and COLUMN=N."""
    counts: dict[str, Any] = {"min_counts": {}}
    for text in texts:
        column, equals, count = text.rpartition("=")
        if not count.removeprefix("-").isdecimal() or (equals and not column):
            raise UserError(f"--min-count is {text!r}; write a number, or a column and its number like C3=10")
        if equals:
            counts["min_counts"][column] = int(count)
        else:
            counts["min_count"] = int(count)
    return counts


@click.command()
@click.option("--data", type=_PATH, required=True, help="The data set's folder.")
def verify(data: Path) -> None:
    """Read a whole data set and check the sizes, checksums and row counts of its files.

    \b
    Example:
      comera verify --data data/
    """
    manifest = read_manifest(data)
    verify_data_set(manifest, data)
    sizes = [file.bytes for file in files_of(manifest)]
    click.echo(f"{data} matches its manifest: {manifest.rows.written:,} rows, {len(sizes):,} files, {format_bytes(sum(sizes))}")


@click.command()
@click.option("--data", type=_PATH, required=True, help="The data set's folder.")
def inspect(data: Path) -> None:
    """Show each column's missing and distinct values, and how many ids cover the rows.

    \b
    Example:
      comera inspect --data data/
    """
    click.echo(to_text(read_manifest(data), data))


def _columns_of_new_values(manifest: Manifest, known: Manifest) -> list[str]:
    """List the columns in which far more cells have id 0 than in the data set that encoded them."""

    def share_at_zero(column: CategoricalColumn, rows: int) -> float:
        return sum(column.rows_at_zero.values()) / max(1, rows)

    columns = zip(manifest.categorical_columns, known.categorical_columns, strict=True)
    return [
        new.name
        for new, old in columns
        if not new.is_list and share_at_zero(new, manifest.rows.written) > share_at_zero(old, known.rows.written) + 0.5
    ]


def _summary(manifest: Manifest, output: Path, seconds: float) -> str:
    rows = manifest.rows
    columns: list[Any] = [*manifest.integer_columns, *manifest.categorical_columns]
    empty = [column.name for column in columns if column.missing == rows.written]
    lines = [
        f"rows: {rows.read:,} read, {rows.written:,} written, {rows.rejected:,} rejected",
        "splits: " + ", ".join(f"{name} {split.rows:,}" for name, split in manifest.splits.items()),
        *(f"  no row is in {name}" for name, split in manifest.splits.items() if not split.rows and "val_from" in manifest.options),
        *([f"{label.name} mean: {label.mean:.4f}" for label in manifest.labels] or ["label mean: no label"]),
        f"embedding rows: {sum(column.num_embeddings for column in manifest.categorical_columns):,}",
        *([f"no row has a value of {', '.join(empty)}"] if empty else []),
        f"wrote {output} in {seconds:.1f} s ({rows.read / seconds:,.0f} rows/s)",
    ]
    lines[1:1] = [f"  rejected {line.file}:{line.line}: {line.reason}" for line in manifest.rejected_lines[:5]]
    return "\n".join(lines)
