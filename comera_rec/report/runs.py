"""Runs as a report shows them, read from their folders.

A run's folder holds config.json, metrics.jsonl and, once it has finished, result.json. A run without a result is shown with what it
has so far.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from data_pipeline.errors import UserError

BASELINE = "dense"
COLORS = 7


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run's folder: an empty `result` until the run has finished, and the lines of metrics.jsonl by kind.

    color: number of its color in charts; 0, which is gray, for the baseline.
    """

    color: int
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
    """Drop the parts of a layer's name that only name wrappers: `over_arch.model.0._mlp.1._linear` -> `over_arch.0.1`.

    A table has its column's name.
    """
    parts = layer.split(".")
    if parts[0] == "sparse_arch":
        return unquote(parts[-1])
    return ".".join(part for part in parts if part != "model" and not part.startswith("_"))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders of runs, finished or not; the first one named `BASELINE` is the baseline.

    Raises:
        ValueError: if there is none, a folder is not a run, or one of its files cannot be read.
    """
    if not folders:
        raise UserError("no run to report on; give at least one folder that `comera train` wrote")
    runs: list[Run] = []
    colors = itertools.cycle(range(1, COLORS))
    for run in map(_read_run, map(Path, folders)):
        is_baseline = run.name == BASELINE and all(other.color for other in runs)
        runs.append(run if is_baseline else replace(run, color=next(colors)))
    return runs


def _read_run(folder: Path) -> Run:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run: it holds no config.json; give a folder that `comera train` wrote")
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "ranks": []}
    for line in _read_lines(folder / "metrics.jsonl"):
        kind = line.get("split") if line["kind"] == "eval" else line["kind"]
        if kind in lines:
            lines[kind].append(line)
    result = _read_json(folder / "result.json") if (folder / "result.json").exists() else {}
    return Run(color=0, folder=folder, config=_read_json(folder / "config.json"), result=result, **lines)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
        return value
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); train the run again") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes() if path.exists() else b""
    lines = []
    # After the last line break there may be a line that is being written, or that a crash cut off.
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            lines.append({"kind": "", "step": 0, **json.loads(line)})
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}, is damaged ({error}); remove the line") from error
    return lines
