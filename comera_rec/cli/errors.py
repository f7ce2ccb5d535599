"""Conversion of a command's errors to one line and an exit status; examples and benchmarks use it, too."""

import os
import re
import sys
from contextlib import suppress
from typing import NoReturn

import click

from data_pipeline.errors import UserError

# Settings that `data_pipeline` names in backquotes, which are options here.
_SETTING = re.compile(
    "`(input|output|data|model|schema|scheduler|split|order|seed|workers|overwrite|part_bytes|memory_limit|max_bad_rows|min_count"
    "|hash_buckets|val_fraction|test_fraction|val_from|test_from|rows|scale|decay|groups)`"
)


def run_command(command: click.Command, program: str, arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 on success, 2 on a user's mistake, which is printed in one line on standard error.

    A mistake is an OSError or a UserError. Any other error is a bug, whose traceback is shown; COMERA_TRACEBACK=1 shows the
    traceback of mistakes, too.
    """
    name = program.split()[-1]
    try:
        status = command.main(args=arguments, prog_name=program, standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        message, status = "interrupted", 130
    except click.exceptions.NoArgsIsHelpError as error:
        tell(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        message, status = error.format_message(), 2
    except (UserError, OSError) as error:
        if os.environ.get("COMERA_TRACEBACK"):
            raise
        message, status = str(error), 2
    tell(f"{name}: {' '.join(message.split())}")
    sys.exit(status)


def tell(message: str) -> None:
    """Print a message, with options in place of settings, on standard error; nobody needs to read it."""
    with suppress(OSError):
        click.echo(
            _SETTING.sub(lambda match: "--" + match[1].replace("part_bytes", "part-size").replace("_", "-"), message), err=True
        )
