"""Peak memory of `comera preprocess` compared with its --memory-limit, on logs whose size says little about the memory they take.

A run that was stopped resumes with the remaining cases; logs and data sets stay in the folder `--data` until they are measured.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data.processes import run_comera
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from data_pipeline.manifest import read_manifest
from data_pipeline.synth import SynthOptions, synth
from data_pipeline.verify import verify

_BLOCK_ROWS, _BLOCK_BYTES = 20_000, 8 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryCase(Sizes):
    """A kind of log, its rows, and the memory limit of the run in MiB."""

    log: str
    rows: int
    limit_mib: int
    dtype: str = "text"


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
    for case, rows in each_case("preprocess-memory", cases(settings.quick), settings):
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            log, output = Path(folder, "log.txt"), Path(folder, "data")
            options = LOGS[case.log](case.rows, log, settings.seed)
            _, _, peak = run_comera(log, output, "--memory-limit", f"{case.limit_mib}MiB", *options)
            verify(read_manifest(output), output)
            counted = {"share_of_limit": peak / case.limit_mib, "text_mib": log.stat().st_size / 2**20}
            yield rows("run", "MiB", {"comera-rec": [peak]}, {"comera-rec": counted})


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
