"""The `comera` command: a table of subcommands and the one place where errors become a line and an exit status.

A subcommand's module is imported when the subcommand runs: preprocessing needs no torch, and importing torchrec takes seconds.
"""

from __future__ import annotations

import dis
import importlib
import os
import sys
from pathlib import Path

import click

COMMANDS = {
    "synth": ("comera_rec.cli.data", "Write Criteo-format logs with a planted signal of known best AUC."),
    "preprocess": ("comera_rec.cli.data", "Turn Criteo logs into Parquet shards and a manifest."),
    "transform": ("comera_rec.cli.data", "Encode new logs with a data set's vocabularies."),
    "verify": ("comera_rec.cli.data", "Check a data set against its manifest."),
    "describe": ("comera_rec.cli.data", "Show what is in a data set."),
    "lookup": ("comera_rec.cli.data", "Show a category's text beside its id."),
    "to-npy": ("comera_rec.cli.data", "Write a data set as torchrec's .npy files."),
    "train": ("comera_rec.cli.model", "Train a DLRM, dense or compressed, from a TOML config."),
    "evaluate": ("comera_rec.cli.model", "Print AUC, NE and logloss of a trained run as one JSON line."),
    "compress": ("comera_rec.cli.model", "Compress a trained dense run, or any TorchRec model's state dict, by TT-SVD."),
    "score": ("comera_rec.cli.serving", "Write a model's scores of a log or of a data set."),
    "serve": ("comera_rec.cli.serve", "Answer requests over HTTP."),
    "report": ("comera_rec.cli.model", "Compare runs on one self-contained HTML page."),
    "export": ("comera_rec.cli.model", "Write a trained run as one file that answers requests, or without TT modules."),
}

_OURS = tuple(Path(__file__).parents[2] / package for package in ("comera_rec", "data_pipeline"))


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="comera-rec")
def cli() -> None:
    """Train recommendation models in compressed form: raw Criteo logs in, a DLRM with tensor-train tables out.

    \b
    Example:
      comera synth --rows 500000 --output raw/train.txt
      comera preprocess --input raw/train.txt --output data/
      comera train --config examples/demo.toml data.path=data/ output=runs/compressed
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 on success, 2 on a user's mistake, which is printed in one line on standard error.

    A mistake is an OSError, or a ValueError from a `raise` of this project. Any other error is a fault of the program, whose
    traceback is shown; COMERA_TRACEBACK=1 shows that of mistakes, too.
    """
    try:
        status = cli.main(args=arguments, prog_name="comera", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        click.echo("comera: interrupted", err=True)
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        message, status = error.format_message(), 2
    except (ValueError, OSError) as error:
        if os.environ.get("COMERA_TRACEBACK") or not (isinstance(error, OSError) or _raised_here(error)):
            raise
        message, status = str(error), 2
    click.echo("comera: " + " ".join(message.split()), err=True)
    sys.exit(status)


def _raised_here(error: BaseException) -> bool:
    """Return whether a `raise` of this project made the error, rather than a function that it called."""
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return any(map(Path(code.co_filename).is_relative_to, _OURS)) and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


if __name__ == "__main__":
    main()
