"""The benchmark's scripts and `preprocess` write the same cells, and a difference stops the benchmark."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.harness.agreement import Disagreement
from benchmarks.preprocess import require_equal_data
from benchmarks.preprocess_rivals import preprocess_with_duckdb, preprocess_with_pandas
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log, with its data set in the folder `ours` beside it."""
    synth(SynthOptions(rows=5000, output=tmp_path / "log.txt", scale=0.01))
    preprocess(PreprocessOptions(inputs=(tmp_path / "log.txt",), output=tmp_path / "ours", part_bytes=300_000))
    return tmp_path / "log.txt"


def test_equals_duckdb(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    preprocess_with_duckdb(log, tmp_path / "duckdb")
    require_equal_data(tmp_path / "ours", tmp_path / "duckdb")


def test_equals_pandas(log: Path, tmp_path: Path) -> None:
    preprocess_with_pandas(log, tmp_path / "pandas")
    require_equal_data(tmp_path / "ours", tmp_path / "pandas")
    changed = pd.read_parquet(tmp_path / "pandas" / "val.parquet")
    changed.loc[3, "C1"] += 1
    changed.to_parquet(tmp_path / "pandas" / "val.parquet")
    with pytest.raises(Disagreement, match="val of comera-rec and pandas differ"):
        require_equal_data(tmp_path / "ours", tmp_path / "pandas")
