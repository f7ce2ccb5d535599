"""Types of options: sizes and times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from data_pipeline.errors import UserError
from data_pipeline.options import parse_bytes


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
