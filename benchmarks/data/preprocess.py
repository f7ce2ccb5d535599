"""Raw Criteo logs to a data set: `comera preprocess`, pandas, Polars and DuckDB scripts, torchrec's functions; one process each.

A run that was stopped resumes with the remaining cases; `--data` keeps the logs for the next run.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.environment import FOLDER, describe
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from data_pipeline.manifest import SPLITS, read_manifest
from data_pipeline.synth import SynthOptions, synth
from data_pipeline.verify import verify

OURS, PANDAS, TORCHREC, POLARS, DUCKDB = "comera-rec", "pandas", "torchrec", "polars", "duckdb"


@dataclass(frozen=True, kw_only=True)
class LogCase:
    """Synthetic logs of Kaggle's cardinalities.

    providers: without the rivals that would take hours, or more memory than there is.
    rounds: how often each provider runs.
    """

    rows: int
    providers: tuple[str, ...] = (OURS, PANDAS, POLARS, DUCKDB, TORCHREC)
    rounds: int = 3
    dtype: str = "text"

    def shapes(self) -> dict[str, Any]:
        return {"rows": self.rows}


def cases(quick: bool) -> list[LogCase]:
    if quick:
        return [LogCase(rows=20_000, rounds=1)]
    return [
        LogCase(rows=10_000, rounds=5),
        LogCase(rows=1_000_000),
        LogCase(rows=5_000_000, providers=(OURS, PANDAS, POLARS, DUCKDB), rounds=1),
        LogCase(rows=20_000_000, providers=(OURS, DUCKDB), rounds=1),
        LogCase(rows=100_000_000, providers=(OURS,), rounds=1),
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Measure wall-clock time, CPU time and peak memory of whole runs, in turns."""
    environment = describe(settings.device)
    finished = {row.shapes["rows"] for row in settings.finished}
    missing = {name for name in (POLARS, DUCKDB) if importlib.util.find_spec(name) is None}
    for case in chosen(cases(settings.quick), settings.only):
        if case.rows in finished:
            continue
        providers = [name for name in case.providers if name not in missing]
        for name in missing.intersection(case.providers):
            tqdm.write(f"preprocess, {case.shapes()}: without {name}, which is not installed (pip install {name})")
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            log = Path(settings.data or folder, f"log-{case.rows}-{settings.seed}.txt")
            if not log.exists():
                synth(SynthOptions(rows=case.rows, output=log, seed=settings.seed))
            samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in providers}
            for _ in tqdm(range(case.rounds), desc=f"preprocess, {case.rows:,} rows", disable=None):
                for name in providers:
                    samples[name].append(_in_a_process(name, Path(folder, name), log))
                _require_right_data(providers, Path(folder))
                for name in providers:
                    shutil.rmtree(Path(folder, name))
        counted = {
            name: {
                "rows_per_s": case.rows / sorted(seconds for seconds, _, _ in found)[len(found) // 2],
                "rows_per_cpu_s": case.rows / sorted(cpu for _, cpu, _ in found)[len(found) // 2],
            }
            for name, found in samples.items()
        }
        tell = partial(
            case_rows,
            "preprocess",
            case,
            settings,
            environment,
            "run",
            counted=counted,
            baselines=(PANDAS, POLARS, DUCKDB, TORCHREC),
        )
        times = {name: [1000 * seconds for seconds, _, _ in found] for name, found in samples.items()}
        yield tell("ms", times) + tell("MiB", {name: [mib for _, _, mib in found] for name, found in samples.items()})


def _in_a_process(provider: str, output: Path, log: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak MiB of a provider's whole run."""
    command = [sys.executable, "-m", "benchmarks.data.rivals", provider, str(output), str(log)]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu, mib


def _require_right_data(providers: Sequence[str], folder: Path) -> None:
    """Compare our data set with those of the scripts; where none of them ran, verify it against its manifest."""
    scripts = [name for name in providers if name in (PANDAS, POLARS, DUCKDB)]
    for name in scripts:
        _require_equal_data(folder / OURS, folder / name)
    if not scripts:
        verify(read_manifest(folder / OURS), folder / OURS)


def _require_equal_data(ours: Path, rival: Path) -> None:
    """Compare two data sets cell by cell; torchrec's can't be compared, because it numbers ids differently."""
    manifest = read_manifest(ours)
    for split in SPLITS:
        shards = [pd.read_parquet(ours / shard.path) for shard in manifest.splits[split].shards]
        expected = pd.read_parquet(rival / f"{split}.parquet")
        try:
            pd.testing.assert_frame_equal(pd.concat(shards, ignore_index=True), expected, check_dtype=False, rtol=1e-6)
        except AssertionError as error:
            raise Disagreement(f"preprocess: {split} of comera-rec and {rival.name} differ: {error}") from None
