"""`comera`, also as `python -m comera_rec`: starts the command line, or says which extra that needs."""

import importlib
import os
import sys
from typing import NoReturn

from data_pipeline.errors import UserError, naming_extras


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit, see `comera_rec.cli.main.main`."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, and the next file that is opened would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w"))
    try:
        with naming_extras():
            command_line = importlib.import_module("comera_rec.cli.main")
    except UserError as error:
        print(f"comera: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(command_line.main(arguments))


if __name__ == "__main__":
    main()
