"""Raw Criteo logs to a data set: `comera preprocess`, pandas and DuckDB scripts, torchrec's functions; one process each.

A run that was stopped resumes with the remaining cases; `--data` keeps the logs for the next run.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from tqdm import tqdm

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.environment import FOLDER
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from data_pipeline.manifest import SPLITS, read_manifest, verify
from data_pipeline.synth import SynthOptions, synth

OURS, SIMILAR, PANDAS, TORCHREC, DUCKDB = "comera-rec", "comera-rec, by similarity", "pandas", "torchrec", "duckdb"


@dataclass(frozen=True, kw_only=True)
class LogCase(Sizes):
    """Synthetic logs of Kaggle's cardinalities.

    providers: without the rivals that would take hours, or more memory than there is.
    rounds: how often each provider runs.
    groups: how strongly values occur in groups, as in `comera synth --groups`.
    """

    rows: int
    groups: float = 0.0
    providers: tuple[str, ...] = (OURS, PANDAS, DUCKDB, TORCHREC)
    rounds: int = 3
    dtype: str = "text"

    def shapes(self) -> dict[str, Any]:
        return {"rows": self.rows, **({"groups": self.groups} if self.groups else {})}


QUICK = (LogCase(rows=20_000, rounds=1),)
FULL = (
    LogCase(rows=10_000, rounds=5),
    LogCase(rows=1_000_000),
    LogCase(rows=5_000_000, providers=(OURS, PANDAS, DUCKDB), rounds=1),
    LogCase(rows=20_000_000, providers=(OURS, DUCKDB), rounds=1),
    LogCase(rows=100_000_000, providers=(OURS,), rounds=1),
    *(LogCase(rows=rows, groups=0.5, providers=(OURS, SIMILAR), rounds=1) for rows in (1_000_000, 5_000_000, 20_000_000)),
)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Measure wall-clock time, CPU time and peak memory of whole runs, in turns."""
    missing = set() if importlib.util.find_spec(DUCKDB) else {DUCKDB}
    for case, rows in each_case("preprocess", QUICK if settings.quick else FULL, settings):
        for name in missing.intersection(case.providers):
            tqdm.write(f"preprocess, {case.shapes()}: without {name}, which is not installed (pip install {name})")
        samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in case.providers if name not in missing}
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            log = Path(settings.data or folder, f"log-{case.rows}-{case.groups}-{settings.seed}.txt")
            if not log.exists():
                synth(SynthOptions(rows=case.rows, output=log, seed=settings.seed, groups=case.groups))
            for _ in range(case.rounds):
                for name, runs in samples.items():
                    runs.append(_measure(name, log, Path(folder, name)))
                _require_right_data(list(samples), Path(folder))
                for name in samples:
                    shutil.rmtree(Path(folder, name))
        ms, cpu_ms, mib = ({name: [run[k] for run in runs] for name, runs in samples.items()} for k in range(3))
        rates = {"rows_per_s": ms, "rows_per_cpu_s": cpu_ms}
        counted = {name: {rate: 1000 * case.rows / median(of[name]) for rate, of in rates.items()} for name in samples}
        rivals = (PANDAS, DUCKDB, TORCHREC)
        yield rows("run", "ms", ms, counted, rivals) + rows("run", "MiB", mib, counted, rivals)


def _measure(provider: str, log: Path, output: Path) -> tuple[float, float, float]:
    """Run a provider of `preprocess_rivals.py` in a new process; return its ms, CPU ms and peak MiB."""
    command = [sys.executable, "-m", "benchmarks.preprocess_rivals", provider, str(output), str(log)]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    ms, cpu_ms, mib = json.loads(done.stdout.splitlines()[-1])
    return ms, cpu_ms, mib


def _require_right_data(providers: Sequence[str], folder: Path) -> None:
    """Compare our data set with those of the scripts; where none of them ran, verify ours against their manifests."""
    scripts = [name for name in providers if name in (PANDAS, DUCKDB)]
    for name in scripts:
        require_equal_data(folder / OURS, folder / name)
    for name in providers if not scripts else ():
        verify(read_manifest(folder / name), folder / name)


def require_equal_data(ours: Path, rival: Path) -> None:
    """Compare two data sets cell by cell; torchrec's can't be compared, because it numbers ids differently."""
    manifest = read_manifest(ours)
    for split in SPLITS:
        shards = [pd.read_parquet(ours / shard.path) for shard in manifest.splits[split].shards]
        expected = pd.read_parquet(rival / f"{split}.parquet")
        try:
            pd.testing.assert_frame_equal(pd.concat(shards, ignore_index=True), expected, check_dtype=False, rtol=1e-6)
        except AssertionError as error:
            raise Disagreement(f"preprocess: {split} of comera-rec and {rival.name} differ: {error}") from None
