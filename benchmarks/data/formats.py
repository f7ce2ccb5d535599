"""`comera preprocess` of one log as text, quoted CSV, JSON lines and Parquet: time of whole runs, each in its own process."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.data.processes import run_comera
from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from data_pipeline.columns import CATEGORIES, INTEGERS
from data_pipeline.manifest import SPLITS, read_manifest
from data_pipeline.synth import SynthOptions, synth

TEXT = "text"
FORMATS = {TEXT: 'separator = "\\t"', "CSV": 'format = "csv"\nheader = true', "JSON lines": 'format = "jsonl"', "Parquet": ""}
"""Format -> the first lines of its schema."""

_COLUMNS = {"label": "label"} | dict.fromkeys(INTEGERS, "integer") | dict.fromkeys(CATEGORIES, "hex")


@dataclass(frozen=True, kw_only=True)
class FormatCase(Sizes):
    """Rows of a synthetic Criteo log."""

    rows: int
    dtype: str = "text"


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each format; `counted` has the rows per second of wall-clock time and of CPU time.

    Raises:
        Disagreement: if the formats don't yield the same data set.
    """
    for case, rows in each_case("preprocess-formats", [FormatCase(rows=2000 if settings.quick else 400_000)], settings):
        samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMATS}
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            _write(case.rows, Path(folder), settings.seed)
            for turn in range(1 if settings.quick else 5):
                for name, runs in samples.items():
                    place = Path(folder, name)
                    runs.append(run_comera(place / "log", place / f"data-{turn}", "--schema", str(place / "schema.toml")))
            _require_equal(Path(folder))
        seconds, cpu, _ = ({name: [run[k] for run in runs] for name, runs in samples.items()} for k in range(3))
        counted = {
            name: {"rows_per_s": case.rows / median(seconds[name]), "rows_per_cpu_s": case.rows / median(cpu[name])}
            for name in FORMATS
        }
        yield rows("run", "ms", {name: [1000 * each for each in of] for name, of in seconds.items()}, counted, (TEXT,))


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
