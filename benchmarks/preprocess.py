"""Raw Criteo logs to a data set: `comera preprocess`, a pandas script and torchrec's functions, each in its own process."""

from __future__ import annotations

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

from benchmarks.agreement import Disagreement
from benchmarks.environment import FOLDER, describe
from benchmarks.measure import Settings, case_rows, chosen
from benchmarks.rows import Row
from data_pipeline.manifest import SPLITS, read_manifest
from data_pipeline.synth import SynthOptions, synth

_DAY_ROWS = 1_000_000  # torchrec holds a day's rows as Python objects, 1.6 GiB a million


@dataclass(frozen=True, kw_only=True)
class LogCase:
    """Synthetic logs of Kaggle's cardinalities, cut into day files for those that read days."""

    rows: int
    dtype: str = "text"

    def shapes(self) -> dict[str, Any]:
        return {"rows": self.rows}


def cases(quick: bool) -> list[LogCase]:
    return [LogCase(rows=20_000)] if quick else [LogCase(rows=1_000_000), LogCase(rows=5_000_000)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Wall and CPU time and peak memory of whole runs, in turns: 3 rounds, 1 where there are more than a million rows."""
    environment = describe(settings.device)
    for case in chosen(cases(settings.quick), settings.only):
        with tempfile.TemporaryDirectory() as folder:
            log, days = _write_logs(case, Path(folder), settings.seed)
            providers = {"comera-rec": [log], "pandas": [log], "torchrec": days}
            samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in providers}
            for turn in tqdm(range(3 if case.rows <= _DAY_ROWS else 1), desc=f"preprocess, {case.rows:,} rows", disable=None):
                for name, logs in providers.items():
                    samples[name].append(_in_a_process(name, Path(folder, f"{name}-{turn}"), logs))
                _require_equal_data(Path(folder, f"comera-rec-{turn}"), Path(folder, f"pandas-{turn}"))
                for name in providers:
                    shutil.rmtree(Path(folder, f"{name}-{turn}"))
        counted = {
            name: {
                "rows_per_s": case.rows / sorted(seconds for seconds, _, _ in found)[len(found) // 2],
                "rows_per_cpu_s": case.rows / sorted(cpu for _, cpu, _ in found)[len(found) // 2],
            }
            for name, found in samples.items()
        }
        baselines = tuple(name for name in providers if name != "comera-rec")
        tell = partial(case_rows, "preprocess", case, settings, environment, "run", counted=counted, baselines=baselines)
        times = {name: [1000 * seconds for seconds, _, _ in found] for name, found in samples.items()}
        yield tell("ms", times) + tell("MiB", {name: [mib for _, _, mib in found] for name, found in samples.items()})


def _write_logs(case: LogCase, folder: Path, seed: int) -> tuple[Path, list[Path]]:
    """One log, and the same lines as days."""
    log = folder / "log.txt"
    synth(SynthOptions(rows=case.rows, output=log, seed=seed))
    if case.rows <= _DAY_ROWS:
        return log, [log]
    days = []
    with log.open("rb") as lines:
        for day in range(-(-case.rows // _DAY_ROWS)):
            days.append(folder / f"day_{day}")
            with days[-1].open("wb") as file:
                file.writelines(line for _, line in zip(range(_DAY_ROWS), lines, strict=False))
    return log, days


def _in_a_process(provider: str, output: Path, logs: Sequence[Path]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak MiB of a provider's whole run."""
    command = [sys.executable, "-m", "benchmarks.rivals", provider, str(output), *map(str, logs)]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu, mib


def _require_equal_data(ours: Path, pandas: Path) -> None:
    """Cell by cell; torchrec numbers ids otherwise, so it can't be compared."""
    manifest = read_manifest(ours)
    for split in SPLITS:
        shards = [pd.read_parquet(ours / shard.path) for shard in manifest.splits[split].shards]
        expected = pd.read_parquet(pandas / f"{split}.parquet")
        try:
            pd.testing.assert_frame_equal(pd.concat(shards, ignore_index=True), expected, check_dtype=False, rtol=1e-6)
        except AssertionError as error:
            raise Disagreement(f"preprocess: {split} of comera-rec and pandas differ: {error}") from None
