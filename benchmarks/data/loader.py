"""From a data set to training batches: `ParquetBatches` in order and shuffled, and torchrec's pipe over .npy files in memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan, alternate, percentiles
from benchmarks.harness.workload import Sizes
from comera_rec.data import ParquetBatches
from data_pipeline.npy import export_npy
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.synth import SynthOptions, synth


@dataclass(frozen=True, kw_only=True)
class LoaderCase(Sizes):
    """An epoch over synthetic rows of Kaggle's cardinalities, in full batches."""

    rows: int
    batch: int = 16_384
    dtype: str = "parquet"


def cases(quick: bool) -> list[LoaderCase]:
    return [LoaderCase(rows=20_000, batch=4_096)] if quick else [LoaderCase(rows=1_000_000)]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time whole epochs in turns, read in the thread that asks for the batches."""
    for case, rows in each_case("loader", cases(settings.quick), settings):
        with tempfile.TemporaryDirectory() as folder:
            log, data, npy = (Path(folder, name) for name in ("log.txt", "data", "npy"))
            synth(SynthOptions(rows=case.rows, output=log, seed=settings.seed))
            manifest = preprocess(PreprocessOptions(inputs=(log,), output=data, val_fraction=0, test_fraction=0))
            export_npy(manifest, data, npy)
            ours = {
                name: ParquetBatches(data, "train", batch_size=case.batch, shuffle=shuffle, drop_last=True)
                for name, shuffle in (("comera-rec", False), ("comera-rec shuffled", True))
            }
            files = [[str(npy / f"train_{part}.npy")] for part in ("dense", "sparse", "labels")]
            torchrec = InMemoryBinaryCriteoIterDataPipe("train", *files, case.batch, rank=0, world_size=1, drop_last=True)
            _require_equal_batches(ours["comera-rec"], torchrec)
            calls = {name: partial(_read, batches) for name, batches in (ours | {"torchrec in memory": torchrec}).items()}
            samples = alternate(calls, settings.plan)
            cpu = alternate(calls, Plan(warmup=0, min_rounds=3, max_rounds=3), clock=time.process_time)  # Arrow has its own threads
        counted = {
            name: {
                "rows_per_s": case.rows / percentiles(times)[1] * 1000,
                "rows_per_cpu_s": case.rows / percentiles(cpu[name])[1] * 1000,
            }
            for name, times in samples.items()
        }
        yield rows("run", "ms", samples, counted, ("torchrec in memory",))


def _read(batches: Any, turn: int) -> None:
    for _ in batches:
        pass


def _require_equal_batches(ours: Any, torchrec: Any) -> None:
    for mine, other in zip(ours, torchrec, strict=True):
        same = torch.equal(mine.dense, other.dense_features) and torch.equal(mine.labels.long(), other.labels.long())
        if not same or not torch.equal(mine.sparse.values(), other.sparse_features.values().long()):
            raise Disagreement("loader: batches of comera-rec and torchrec differ")
