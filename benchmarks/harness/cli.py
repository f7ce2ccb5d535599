"""Errors of the benchmark commands become one line and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from benchmarks.harness.agreement import Disagreement


def run_command(command: click.Command, name: str, arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 on success, 1 where providers disagree, 2 on a user's mistake."""
    try:
        status = command.main(args=arguments, prog_name=f"python -m {name}", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        message, status = "interrupted", 130
    except click.ClickException as error:
        message, status = error.format_message(), 2
    except (ValueError, OSError) as error:
        message, status = str(error), 2
    except Disagreement as error:
        message, status = f"nothing timed, providers disagree: {error}", 1
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    sys.exit(status)
