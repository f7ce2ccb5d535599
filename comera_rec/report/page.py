"""Results of runs: one self-contained HTML page, a table for the terminal, and summary.json.

Runs are compared with the one named "dense", if there is one.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from comera_rec.report import charts
from comera_rec.report.runs import BASELINE, Run
from data_pipeline.atomic import replacing, write_json
from data_pipeline.errors import UserError

_SUMMARY_KEYS = (
    *("params", "bytes", "auc", "ne", "logloss", "step_ms", "peak_mib"),
    *("table_bytes", "dense_bytes", "dense_table_bytes", "rows_per_s", "steps", "rows", "split", "seed", "device"),
)


def write_summary(runs: list[Run], path: Path) -> None:
    """Write a JSON file that maps each run's folder name, or its path where names are equal, to its numbers.

    Those that a run lacks are null.
    """
    names = [run.folder.resolve().name for run in runs]
    keys = [str(run.folder) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
    numbers = [{"finished": bool(run.result)} | {key: run.value(key) for key in _SUMMARY_KEYS} for run in runs]
    write_json(path, dict(zip(keys, numbers, strict=True)))


def require_summary(path: Path) -> None:
    """Raise ValueError if a path that is to become a summary holds something else."""
    if path.exists():
        try:
            is_summary = all("finished" in run for run in dict(json.loads(path.read_text())).values())
        except (ValueError, TypeError, OSError):
            is_summary = False
        if not is_summary:
            raise UserError(f"{path} exists and is not a summary of runs: choose another folder for the page, or move that file")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the comparison: how it is written, and how it is compared with the baseline's (value, baseline -> text)."""

    key: str
    title: str
    text: Callable[[Any], str]
    relative: Callable[[float, float], str]


def count(value: float) -> str:
    """Write a number without decimals: 12345.6 -> 12,346."""
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Write bytes in the largest binary unit that leaves at least 1."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(int(math.log(max(value, 1), 1024)), len(units) - 1)
    return f"{value / 1024**power:,.{2 if power else 0}f} {units[power]}"


def ratio(value: float, other: float) -> str:
    """Write value / other with three digits, such as 0.51x or 99.4x."""
    quotient = value / other
    return f"{quotient:,.0f}x" if quotient >= 100 else f"{quotient:.3g}x"


def _smaller(value: float, baseline: float) -> str:
    return f"{ratio(baseline, value)} smaller" if value < baseline else ratio(value, baseline)


def _difference(value: float, baseline: float) -> str:
    return f"{value - baseline:+.4f}"


COLUMNS = (
    Column(key="params", title="Parameters", text=count, relative=_smaller),
    Column(key="bytes", title="Model", text=size, relative=_smaller),
    Column(key="table_bytes", title="Tables", text=size, relative=_smaller),
    Column(key="auc", title="AUC", text="{:,.4f}".format, relative=_difference),
    Column(key="ne", title="NE", text="{:,.4f}".format, relative=_difference),
    Column(key="logloss", title="Logloss", text="{:,.4f}".format, relative=_difference),
    Column(key="step_ms", title="ms / step", text="{:,.1f}".format, relative=ratio),
    Column(key="peak_mib", title="Peak MiB", text=count, relative=ratio),
)


def _cell(column: Column, run: Run, baseline: Run | None) -> tuple[str, str]:
    """Return the number, "-" if there is none, and how it compares with the baseline, "" if it doesn't."""
    value = run.value(column.key)
    if value is None:
        return "-", ""
    reference = baseline.value(column.key) if baseline and baseline is not run else None
    return column.text(value), column.relative(value, reference) if value and reference else ""


def _baseline(runs: list[Run]) -> Run | None:
    return next((run for run in runs if not run.color), None)


def summary_table(runs: list[Run]) -> str:
    """Return the comparison as text, one line per run, followed by a line that relates it to the dense run."""
    baseline = _baseline(runs)
    rows = [["run", *(column.title for column in COLUMNS)]]
    tested = {(run.value("split"), run.value("rows")) for run in runs if run.result}
    for run in runs:
        cells = [_cell(column, run, baseline) for column in COLUMNS]
        rows_of_split = f", {count(run.value('rows'))} rows" if run.value("rows") else ""
        data = f" ({run.value('split')} split{rows_of_split})" if len(tested) > 1 else ""
        name = f"{run.name}{data}" if run.result else f"{run.name} (step {run.step}, not finished)"
        rows.append([name, *(value for value, _ in cells)])
        if any(relative for _, relative in cells):
            rows.append([f"  vs {BASELINE}", *(relative or "-" for _, relative in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    return "\n".join(line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]])


def write_report(runs: list[Run], output: Path, *, best_auc: float | None = None) -> None:
    """Write one HTML page that compares runs and needs nothing else: styles, script and drawings are inside.

    Args:
        runs: finished or not.
        output: the page's path; it appears there whole or not at all.
        best_auc: the best AUC that any model can reach, where it is known.

    Raises:
        OSError: the page cannot be written.
    """
    baseline = _baseline(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"count": count, "id": id, "json": lambda value: json.dumps(value, indent=2)}
    page = environment.get_template("report.html.j2").render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=runs,
        columns=COLUMNS,
        cells={id(run): [_cell(column, run, baseline) for column in COLUMNS] for run in runs},
        baseline=baseline,
        highlights=_highlights(runs, baseline),
        best_auc=best_auc,
        curves=[(title, Markup(svg)) for title, svg in charts.curves(runs, best_auc=best_auc)],
        ranks={id(run): Markup(charts.ranks_over_time(run)) for run in runs if len(run.ranks) > 1},
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as beside:
        beside.write_text(page, encoding="utf-8")


def _highlights(runs: list[Run], baseline: Run | None) -> list[tuple[str, str, str]]:
    """Compare the smallest finished run with the baseline: (number, what it is, detail)."""
    finished = [run for run in runs if run.value("table_bytes") and run is not baseline]
    if not baseline or not baseline.result or not finished:
        return []
    best = min(finished, key=lambda run: run.value("bytes"))

    def pair(key: str) -> tuple[float, float]:
        return best.value(key) or math.nan, baseline.value(key) or math.nan

    auc, step, peak = pair("auc"), pair("step_ms"), pair("peak_mib")
    tables = pair("table_bytes")
    highlights = [
        (tables, ratio(tables[1], tables[0]), "smaller tables", f"{size(tables[0])} instead of {size(tables[1])}"),
        (auc, _difference(*auc), "AUC", f"{auc[0]:.4f} against {auc[1]:.4f}"),
        (step, ratio(*step), "time per step", f"{step[0]:,.1f} ms against {step[1]:,.1f} ms"),
        (peak, ratio(*peak), "peak memory", f"{peak[0]:,.0f} MiB against {peak[1]:,.0f} MiB"),
    ]
    return [(number, what, detail) for pair, number, what, detail in highlights if not math.isnan(sum(pair))]
