"""The subcommand `comera train`."""

from __future__ import annotations

import importlib

import click


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False),
    help="The run's TOML file; keys that it lacks have their defaults.",
)
@click.option("--output", metavar="FOLDER", help="The run's folder; the same as output=FOLDER.")
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@click.pass_context
def train(context: click.Context, config_path: str | None, output: str | None, overrides: tuple[str, ...]) -> None:
    """Train a model, dense or compressed: DLRM, or another `model.architecture`.

    Everything is written to the config's `output` folder, with a report.html at the end. Running the command again resumes from the
    last checkpoint. SIGTERM and Ctrl-C stop after the current step, with a checkpoint. Under torchrun tables are sharded over the
    processes, which share each batch; `--max-restarts` resumes from the last checkpoint.

    \b
    Example:
      comera train data.path=data/ output=runs/first tables.compression=100
      comera train --config examples/demo.toml data.path=data/ output=runs/compressed training.epochs=2
      torchrun --nproc-per-node 2 --max-restarts 3 -m comera_rec.train --config examples/demo.toml data.path=data/
    """
    # It imports torch, which takes seconds: a missing file is refused before.
    run = importlib.import_module("comera_rec.cli.training_run")
    run.train(context, config_path, (*overrides, *([] if output is None else [f"output={output}"])))
