"""`comera preprocess` of one log as text, quoted CSV, JSON lines and Parquet: time of whole runs, each in its own process."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from benchmarks.data.rivals import CATEGORIES, INTEGERS
from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.environment import FOLDER, describe
from benchmarks.harness.measure import Settings, case_rows
from benchmarks.harness.rows import Row
from data_pipeline.manifest import SPLITS, read_manifest
from data_pipeline.synth import SynthOptions, synth

TEXT = "text"
FORMATS = {TEXT: 'separator = "\\t"', "CSV": 'format = "csv"\nheader = true', "JSON lines": 'format = "jsonl"', "Parquet": ""}
"""Format -> the first lines of its schema."""

_COLUMNS = {"label": "label"} | dict.fromkeys(INTEGERS, "integer") | dict.fromkeys(CATEGORIES, "hex")
_COMMAND = """
import json, resource, sys, time
start = time.perf_counter()
from comera_rec.cli.main import main
try:
    main(["preprocess", *sys.argv[1:]])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([time.perf_counter() - start, used.ru_utime + used.ru_stime]))
"""


@dataclass(frozen=True, kw_only=True)
class FormatCase:
    """A synthetic Criteo log.

    rows: rows of the log.
    rounds: how often each format is read.
    """

    rows: int
    rounds: int
    dtype: str = "text"

    def shapes(self) -> dict[str, Any]:
        return {"rows": self.rows}


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each format; `counted` has the rows per second of wall-clock time and of CPU time.

    Raises:
        Disagreement: if the formats don't yield the same data set.
    """
    case = FormatCase(rows=2000, rounds=1) if settings.quick else FormatCase(rows=400_000, rounds=5)
    with tempfile.TemporaryDirectory(dir=settings.data) as name:
        folder = Path(name)
        _write(case.rows, folder, settings.seed)
        samples: dict[str, list[tuple[float, float]]] = {format_name: [] for format_name in FORMATS}
        for turn in tqdm(range(case.rounds), desc="preprocess-formats", unit="round", disable=None):
            for format_name, seconds in samples.items():
                seconds.append(_seconds(folder, format_name, f"data-{turn}"))
        _require_equal(folder)
    counted = {
        format_name: {"rows_per_s": case.rows / statistics.median(wall), "rows_per_cpu_s": case.rows / statistics.median(cpu)}
        for format_name, seconds in samples.items()
        for wall, cpu in [zip(*seconds, strict=True)]
    }
    times = {format_name: [1000 * wall for wall, _ in seconds] for format_name, seconds in samples.items()}
    yield case_rows("preprocess-formats", case, settings, describe(settings.device), "run", "ms", times, counted, (TEXT,))


def _write(rows: int, folder: Path, seed: int) -> None:
    """Write the log in every format, each in a folder with its schema."""
    for format_name, head in FORMATS.items():
        (folder / format_name).mkdir()
        lines = [head, "[columns]", *(f'{name} = "{kind}"' for name, kind in _COLUMNS.items())]
        (folder / format_name / "schema.toml").write_text("\n".join(lines))
    text = folder / TEXT / "log"
    synth(SynthOptions(rows=rows, output=text, seed=seed))
    types = {name: "str" if kind == "hex" else "Int64" for name, kind in _COLUMNS.items()}
    frame = pd.read_csv(text, sep="\t", names=list(_COLUMNS), dtype=types)
    frame.to_csv(folder / "CSV" / "log", index=False, quoting=csv.QUOTE_NONNUMERIC)
    frame.to_json(folder / "JSON lines" / "log", orient="records", lines=True)
    frame.to_parquet(folder / "Parquet" / "log", index=False)


def _seconds(folder: Path, format_name: str, output: str) -> tuple[float, float]:
    """Wall-clock seconds and CPU seconds of a run."""
    place = folder / format_name
    options = ["--input", place / "log", "--schema", place / "schema.toml", "--output", place / output]
    command = [sys.executable, "-c", _COMMAND, *map(str, options)]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def _require_equal(folder: Path) -> None:
    for split in SPLITS:
        frames = {}
        for format_name in FORMATS:
            data = folder / format_name / "data-0"
            shards = [pd.read_parquet(data / shard.path) for shard in read_manifest(data).splits[split].shards]
            frames[format_name] = pd.concat(shards, ignore_index=True)
        for format_name, frame in frames.items():
            if not frame.equals(frames[TEXT]):
                raise Disagreement(f"preprocess-formats: {split} differs between {format_name} and {TEXT}")
