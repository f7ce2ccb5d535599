"""The benchmark's pandas script and `preprocess` write the same cells, and a difference stops the benchmark."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.data.preprocess import _require_equal_data
from benchmarks.data.rivals import preprocess_with_pandas
from benchmarks.harness.agreement import Disagreement
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth


def test_equals_pandas(tmp_path: Path) -> None:
    synth(SynthOptions(rows=5000, output=tmp_path / "log.txt", scale=0.01))
    preprocess(PreprocessOptions(inputs=(tmp_path / "log.txt",), output=tmp_path / "ours", part_bytes=300_000))
    preprocess_with_pandas(tmp_path / "log.txt", tmp_path / "pandas")
    _require_equal_data(tmp_path / "ours", tmp_path / "pandas")
    changed = pd.read_parquet(tmp_path / "pandas" / "val.parquet")
    changed.loc[3, "C1"] += 1
    changed.to_parquet(tmp_path / "pandas" / "val.parquet")
    with pytest.raises(Disagreement, match="val of comera-rec and pandas differ"):
        _require_equal_data(tmp_path / "ours", tmp_path / "pandas")
