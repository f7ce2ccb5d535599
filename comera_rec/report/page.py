"""Results of runs: one self-contained HTML page, a table for the terminal, and summary.json.

A run's folder holds config.json, metrics.jsonl and, once it has finished, result.json. A run without a result is shown with what it
has so far. Runs are compared with the one named "dense", if there is one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from comera_rec.report import charts

BASELINE = "dense"
_SUMMARY_KEYS = (
    *("params", "bytes", "auc", "ne", "logloss", "step_ms", "peak_mib"),
    *("table_bytes", "dense_bytes", "dense_table_bytes", "rows_per_s", "steps", "rows", "split", "seed", "device"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run's folder: an empty `result` until the run has finished, and the lines of metrics.jsonl by kind."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    train: list[dict[str, Any]] = field(default_factory=list)
    val: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.result.get("name") or self.folder.resolve().name)

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.train + self.val + self.ranks), default=0)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The result's layers with a `label` short enough for charts, in descending order of their dense size."""
        layers = [{**layer, "label": short_name(layer["name"])} for layer in self.result.get("layers", [])]
        return sorted(layers, key=lambda layer: -layer["dense_bytes"])

    def value(self, key: str) -> Any:
        """Return a number of the result, or of the last evaluation if there is no result; None if it is missing or not finite."""
        value = self.result.get(key, self.val[-1].get(key) if self.val and not self.result else None)
        return None if isinstance(value, float) and not math.isfinite(value) else value


def short_name(layer: str) -> str:
    """Drop the parts of a layer's name that only name wrappers: `over_arch.model.0._mlp.1._linear` -> `over_arch.0.1`."""
    parts = layer.split(".")
    if parts[0] == "sparse_arch":
        return parts[-1]
    return ".".join(part for part in parts if part != "model" and not part.startswith("_"))


def read_run(folder: Path) -> Run:
    """Read a run's folder, finished or not.

    Raises:
        ValueError: if the folder is not a run, or one of its files cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a run: it holds no config.json; give a folder that `comera train` wrote")
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "ranks": []}
    for line in _read_lines(folder / "metrics.jsonl"):
        kind = line.get("split") if line["kind"] == "eval" else line["kind"]
        if kind in lines:
            lines[kind].append(line)
    result = _read_json(folder / "result.json") if (folder / "result.json").exists() else {}
    return Run(folder=folder, config=_read_json(folder / "config.json"), result=result, **lines)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
        return value
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); train the run again") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes() if path.exists() else b""
    lines = []
    # After the last line break there may be a line that is being written, or that a crash cut off.
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            lines.append({"kind": "", "step": 0, **json.loads(line)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}, is damaged ({error}); remove the line") from error
    return lines


def _read_runs(folders: list[Path]) -> list[Run]:
    if not folders:
        raise ValueError("no run to report on; give at least one folder that `comera train` wrote")
    return [read_run(Path(folder)) for folder in folders]


def write_summary(runs: list[Path], path: Path) -> None:
    """Write a JSON file that maps each run's folder name to its numbers; those that a run lacks are null.

    Raises:
        ValueError: a folder is not a run.
    """
    summary = {
        run.folder.resolve().name: {"finished": bool(run.result)} | {key: run.value(key) for key in _SUMMARY_KEYS}
        for run in _read_runs(runs)
    }
    _write(path, json.dumps(summary, indent=2) + "\n")


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
    return f"{ratio(baseline, value)} smaller" if value < baseline else f"{ratio(value, baseline)}"


def _difference(value: float, baseline: float) -> str:
    return f"{value - baseline:+.4f}"


def _decimals(places: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{places}f}"


COLUMNS = (
    Column(key="params", title="Parameters", text=count, relative=_smaller),
    Column(key="bytes", title="Model", text=size, relative=_smaller),
    Column(key="table_bytes", title="Tables", text=size, relative=_smaller),
    Column(key="auc", title="AUC", text=_decimals(4), relative=_difference),
    Column(key="ne", title="NE", text=_decimals(4), relative=_difference),
    Column(key="logloss", title="Logloss", text=_decimals(4), relative=_difference),
    Column(key="step_ms", title="ms / step", text=_decimals(1), relative=ratio),
    Column(key="peak_mib", title="Peak MiB", text=_decimals(0), relative=ratio),
)


def _cell(column: Column, run: Run, baseline: Run | None) -> tuple[str, str]:
    """The number, and how it compares with the baseline; empty strings where there is none."""
    value = run.value(column.key)
    if value is None:
        return "-", ""
    if column.key == "table_bytes" and run.value("dense_table_bytes") == 0:
        return "none", ""
    reference = baseline.value(column.key) if baseline and baseline is not run else None
    return column.text(value), column.relative(value, reference) if value and reference else ""


def _baseline(runs: list[Run]) -> Run | None:
    return next((run for run in runs if run.name == BASELINE), None)


def summary_table(runs: list[Path]) -> str:
    """Return the comparison as text, one line per run, followed by a line that relates it to the dense run.

    Raises:
        ValueError: a folder is not a run.
    """
    read = _read_runs(runs)
    baseline = _baseline(read)
    rows = [["run", *(column.title for column in COLUMNS)]]
    for run in read:
        cells = [_cell(column, run, baseline) for column in COLUMNS]
        rows.append([run.name if run.result else f"{run.name} (step {run.step}, not finished)", *(value for value, _ in cells)])
        if any(relative for _, relative in cells):
            rows.append([f"  vs {BASELINE}", *(relative or "-" for _, relative in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    return "\n".join(line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]])


def write_report(runs: list[Path], output: Path, *, best_auc: float | None = None) -> None:
    """Write one HTML page that compares runs and needs nothing else: styles, script and drawings are inside.

    Args:
        runs: folders of runs, finished or not.
        output: the page's path; it appears there whole or not at all.
        best_auc: the best AUC that any model can reach, where it is known.

    Raises:
        ValueError: a folder is not a run.
        OSError: the page cannot be written.
    """
    read = _read_runs(runs)
    baseline = _baseline(read)
    # The baseline is gray wherever it stands; the others take the colors in order.
    others = [run for run in read if run is not baseline]
    colors = [0 if run is baseline else 1 + others.index(run) % (len(charts.SERIES) - 1) for run in read]
    series = [
        charts.Series(color=color, train=run.train, val=run.val, ranks=run.ranks) for color, run in zip(colors, read, strict=True)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"count": count, "id": id, "json": lambda value: json.dumps(value, indent=2)}
    page = environment.get_template("report.html.j2").render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=list(zip(read, colors, strict=True)),
        columns=COLUMNS,
        cells={id(run): [_cell(column, run, baseline) for column in COLUMNS] for run in read},
        baseline=baseline,
        highlights=_highlights(read, baseline),
        best_auc=best_auc,
        curves=[(title, Markup(svg)) for title, svg in charts.curves(series, best_auc=best_auc)],
        sizes=Markup(charts.model_size(series)),
        pareto=Markup(charts.size_against_ne(_sizes_and_ne(read, colors))),
        tables={id(run): Markup(charts.table_bytes(run.layers, color)) for run, color in zip(read, colors, strict=True)},
        ranks={
            id(run): Markup(charts.ranks_over_time(run.ranks, run.step, short_name, color))
            for run, color in zip(read, colors, strict=True)
            if len(run.ranks) > 1
        },
    )
    _write(output, page)


def _sizes_and_ne(runs: list[Run], colors: list[int]) -> list[tuple[int, str, float, float]]:
    points = [(color, run.name, run.value("bytes"), run.value("ne")) for color, run in zip(colors, runs, strict=True)]
    return [(color, name, size, ne) for color, name, size, ne in points if size and ne]


def _highlights(runs: list[Run], baseline: Run | None) -> list[tuple[str, str, str]]:
    """Compare the smallest finished run with the baseline: (number, what it is, detail)."""
    finished = [run for run in runs if run.result and run is not baseline]
    if not baseline or not baseline.result or not finished:
        return []
    best = min((run for run in finished if run.value("table_bytes")), key=lambda run: run.value("bytes"), default=None)
    if best is None:
        return []

    def pair(key: str) -> tuple[float, float]:
        return best.value(key) or math.nan, baseline.value(key) or math.nan

    auc, step, peak = pair("auc"), pair("step_ms"), pair("peak_mib")
    tables = pair("table_bytes")
    return [
        (ratio(tables[1], tables[0]), "smaller tables", f"{size(tables[0])} instead of {size(tables[1])}"),
        (_difference(*auc), "AUC", f"{auc[0]:.4f} against {auc[1]:.4f}"),
        (ratio(*step), "time per step", f"{step[0]:,.1f} ms against {step[1]:,.1f} ms"),
        (ratio(*peak), "peak memory", f"{peak[0]:,.0f} MiB against {peak[1]:,.0f} MiB"),
    ]


def _write(path: Path, text: str) -> None:
    """Write beside, then rename, so that a reader never finds a partial file."""
    temporary = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
