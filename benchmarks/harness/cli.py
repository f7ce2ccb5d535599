"""Reports errors of the benchmark commands as one line and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from benchmarks.harness.agreement import Disagreement
from comera_rec.cli.errors import run_command as run


def run_command(command: click.Command, name: str, arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 on success, 1 if providers disagree, 2 on a user's mistake."""
    try:
        run(command, f"python -m {name}", arguments)
    except Disagreement as error:
        click.echo(f"{name}: nothing timed, providers disagree: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
