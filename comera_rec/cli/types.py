"""Types of options: sizes, locations and times."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from data_pipeline.options import parse_bytes
from data_pipeline.sources import Source, source


class Bytes(click.ParamType):
    """A size such as 64MiB."""

    name = "SIZE"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Location(click.ParamType):
    """A path or a URL; URLs stay as they are."""

    name = "PATH"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Source:
        return source(value) if isinstance(value, str) else value


class Time(click.ParamType):
    """An ISO 8601 date or time, in UTC unless it has a zone, converted to seconds since 1970; numbers stay as they are."""

    name = "TIME"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            try:
                time = datetime.fromisoformat(str(value))
                return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
            except ValueError:
                self.fail(f"{value!r} is not a time; write it like 2026-01-31 or 2026-01-31T12:00", param, ctx)
