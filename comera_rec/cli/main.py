"""The `comera` command: a table of subcommands.

A subcommand's module is imported when the subcommand runs: preprocessing needs no torch, and importing torchrec takes seconds.
"""

import difflib
import importlib
import logging
import warnings
from typing import NoReturn

import click

from comera_rec.cli.errors import run_command
from data_pipeline.errors import naming_extras

# TorchRec checks at every start whether it is being traced, and torch warns about that check.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
# torch and TorchRec warn about deprecated features that they use themselves.
logging.getLogger("torchrec.distributed.planner.types").setLevel(logging.ERROR)
for _message in ("Please use DTensor", "`broadcast_buffers` is deprecated"):
    warnings.filterwarnings("ignore", _message, FutureWarning)

COMMANDS = {
    "synth": ("comera_rec.cli.data", "Write Criteo-format logs with a planted signal of known best AUC."),
    "preprocess": ("comera_rec.cli.data", "Turn logs, Criteo's or others, into Parquet shards and a manifest."),
    "transform": ("comera_rec.cli.data", "Encode new logs with a data set's vocabularies."),
    "verify": ("comera_rec.cli.data", "Check a data set against its manifest."),
    "inspect": ("comera_rec.cli.data", "Show what is in a data set."),
    "train": ("comera_rec.cli.train", "Train a model, dense or compressed, from a TOML config."),
    "evaluate": ("comera_rec.cli.model", "Print AUC, NE and logloss of a trained run as one JSON line."),
    "compress": ("comera_rec.cli.model", "Compress a trained dense run by TT-SVD."),
    "score": ("comera_rec.cli.score", "Score a log or a data set with a model."),
    "serve": ("comera_rec.cli.serve", "Answer requests over HTTP."),
    "report": ("comera_rec.cli.report", "Compare runs on one self-contained HTML page."),
    "export": ("comera_rec.cli.model", "Export a trained run as one file for serving, or as a dense model."),
}


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with naming_extras():
            command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(error.message + hint, ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}
)
@click.version_option(package_name="comera-rec")
def cli() -> None:
    """Train recommendation models in compressed form: raw logs in, a model with tensor-train tables out.

    \b
    Example:
      comera synth --rows 500000 --output raw/train.txt
      comera preprocess --input raw/train.txt --output data/
      comera train --config examples/demo.toml data.path=data/ output=runs/compressed
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 on success, 2 on a user's mistake."""
    run_command(cli, "comera", arguments)
