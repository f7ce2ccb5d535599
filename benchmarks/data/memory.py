"""Peak memory of `comera preprocess` compared with its --memory-limit, on logs whose size says little about the memory they take.

A run that was stopped resumes with the remaining cases; logs and data sets stay in the folder `--data` until they are measured.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.harness.environment import FOLDER, describe
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from data_pipeline.manifest import read_manifest
from data_pipeline.synth import SynthOptions, synth
from data_pipeline.verify import verify

_BLOCK_ROWS, _BLOCK_BYTES = 20_000, 8 << 20
# Not getrusage's ru_maxrss: a child's starts at its parent's peak.
_COMMAND = """
import sys
from pathlib import Path
from comera_rec.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(Path("/proc/self/status").read_text())
"""


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One kind of log.

    rows: rows of the log.
    limit_mib: memory limit of the run, in MiB.
    """

    log: str
    rows: int
    limit_mib: int
    dtype: str = "text"

    def shapes(self) -> dict[str, Any]:
        return {"log": self.log, "rows": self.rows, "limit_mib": self.limit_mib}


def cases(quick: bool) -> list[MemoryCase]:
    """Half a gigabyte of each kind, under the smallest limit that the default part size allows, and under twice that."""
    rows = {"criteo": 2_000_000, "empty cells": 8_000_000, "short tokens": 1_200_000, "long lists": 5_000, "distinct": 50_000_000}
    return [
        MemoryCase(log=log, rows=max(count // 100, 100) if quick else count, limit_mib=limit)
        for limit in (512, 1024)
        for log, count in rows.items()
        if not quick or limit == 512
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield one row per case; `counted` has the peak divided by the limit, which should be at most 1.1."""
    environment = describe(settings.device)
    finished = [row.shapes for row in settings.finished]
    left = [case for case in chosen(cases(settings.quick), settings.only) if case.shapes() not in finished]
    for case in tqdm(left, desc="preprocess-memory", unit="case", disable=None):
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            log, output = Path(folder, "log.txt"), Path(folder, "data")
            options = LOGS[case.log](case.rows, log, settings.seed)
            peak = _peak_mib(["--input", str(log), "--output", str(output), "--memory-limit", f"{case.limit_mib}MiB", *options])
            verify(read_manifest(output), output)
            counted = {"comera-rec": {"share_of_limit": peak / case.limit_mib, "text_mib": log.stat().st_size / 2**20}}
            yield case_rows("preprocess-memory", case, settings, environment, "run", "MiB", {"comera-rec": [peak]}, counted)


def _peak_mib(arguments: list[str]) -> float:
    command = [sys.executable, "-c", _COMMAND, "preprocess", *arguments]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert peak, "Linux reports the peak"
    return int(peak[1]) / 1024


def _criteo(rows: int, log: Path, seed: int) -> list[str]:
    synth(SynthOptions(rows=rows, output=log, seed=seed))
    return []


def _empty_cells(rows: int, log: Path, seed: int) -> list[str]:
    """Write a log with Criteo's columns and one cell in forty filled."""
    draw = random.Random(seed)

    def row() -> str:
        return "\t".join(["1", *(draw.choice("123456789") if draw.random() < 1 / 40 else "" for _ in range(39))])

    return _repeat(row, rows, log)


def _lists(rows: int, log: Path, seed: int, *, length: int, most: int) -> list[str]:
    """Write a log with one column of lists of up to `length` numbers below `most`."""
    draw = random.Random(seed)
    schema = log.with_name("schema.toml")
    schema.write_text('separator = ","\n[columns]\nclick = "label"\ntags = { kind = "list", separator = "|" }\n')

    def row() -> str:
        return "0," + "|".join([str(draw.randrange(most)) for _ in range(draw.randrange(length))])

    return [*_repeat(row, rows, log), "--schema", str(schema)]


def _distinct(rows: int, log: Path, seed: int) -> list[str]:
    """Write a log with a column of distinct values, all of which get ids."""
    schema = log.with_name("schema.toml")
    schema.write_text('[columns]\nclick = "label"\nuser = "hex"\n')
    with log.open("w") as file:
        for start in range(0, rows, _BLOCK_ROWS):
            numbers = np.arange(start, min(start + _BLOCK_ROWS, rows), dtype=np.uint32) * np.uint32(2 * seed + 2654435761)
            file.write("".join([f"1\t{number:08x}\n" for number in numbers.tolist()]))
    return ["--schema", str(schema), "--min-count", "1"]


def _repeat(row: Callable[[], str], rows: int, log: Path) -> list[str]:
    """Write newly drawn rows up to a few megabytes, then repeat them."""
    block, size = list[str](), 0
    while len(block) < min(rows, _BLOCK_ROWS) and size < _BLOCK_BYTES:
        block.append(row() + "\n")
        size += len(block[-1])
    with log.open("w") as file:
        for start in range(0, rows, len(block)):
            file.writelines(block[: rows - start])
    return []


LOGS: dict[str, Callable[[int, Path, int], list[str]]] = {
    "criteo": _criteo,
    "empty cells": _empty_cells,
    "short tokens": lambda rows, log, seed: _lists(rows, log, seed, length=400, most=10),
    "long lists": lambda rows, log, seed: _lists(rows, log, seed, length=30_000, most=1_000_000),
    "distinct": _distinct,
}
