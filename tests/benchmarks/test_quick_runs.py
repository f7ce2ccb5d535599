"""Each benchmark runs from end to end with small cases, after its providers' values were found to agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.measure import Settings, measure_case
from benchmarks.harness.rows import read_rows
from benchmarks.harness.timing import Plan
from benchmarks.lookup.tables import FBGEMM, ON_CPU, OURS, TT, LookupCase, LookupWorkload
from benchmarks.preprocess import require_equal_data
from benchmarks.preprocess_rivals import preprocess_with_pandas
from benchmarks.run import BENCHMARKS, RESUMABLE, run
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

FAST = ("linear", "transformer")
FEW = Settings(plan=Plan(warmup=1, min_rounds=2, max_rounds=2), memory=False)
SMALL = LookupCase(rows=(1009, 53), dim=8, order=3, rank=4, batch=16, bag=3, providers=(*ON_CPU, TT))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BENCHMARKS])
def test_a_quick_run_yields_rows(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = [name, "--quick", "--seconds", "0", "--no-memory", "--json", str(file)]
    CliRunner().invoke(run, arguments, standalone_mode=False, catch_exceptions=False)
    rows = read_rows(file)
    assert {row.op for row in rows} == {name}
    if name == "linear":
        made = {(row.provider, row.pass_) for row in rows}
        assert made == {(provider, pass_) for provider in ("nn.Linear", "TTLinear") for pass_ in ("forward", "forward+backward")}
    if name in RESUMABLE:  # finished runs aren't repeated
        CliRunner().invoke(run, arguments, standalone_mode=False, catch_exceptions=False)
        assert read_rows(file) == rows


@pytest.mark.parametrize("order", [2, 3])
def test_all_lookups_agree(order: int) -> None:
    rows = measure_case("lookup", replace(SMALL, order=order), LookupWorkload, FEW)
    assert {row.provider for row in rows} == {*ON_CPU, TT}
    assert (FBGEMM, "forward+backward") not in {(row.provider, row.pass_) for row in rows}


def test_a_wrong_slice_or_row_is_caught() -> None:
    workload = LookupWorkload(SMALL, "cpu", 0)
    made = workload.providers[OURS]()
    wrong = next(p for name, p in made.module.named_parameters() if name.endswith("t1.core_1"))
    with torch.no_grad():
        wrong *= 1.001
    with pytest.raises(Disagreement, match="is off by"):
        require_agreement(workload.reference(), {OURS: made.verify()})

    class OneWrong(LookupWorkload):
        def _tables(self) -> list[torch.Tensor]:
            tables = super()._tables()
            tables[1][self.batches[0].unique_ids[1][-1]] *= 1.01
            return tables

    with pytest.raises(Disagreement, match="FBGEMM: output is off"):
        measure_case("lookup", replace(SMALL, providers=(FBGEMM, OURS)), OneWrong, FEW)


def test_preprocessing_equals_a_pandas_script(tmp_path: Path) -> None:
    log, ours, rival = (tmp_path / name for name in ("log.txt", "ours", "pandas"))
    synth(SynthOptions(rows=5000, output=log, scale=0.01))
    preprocess(PreprocessOptions(inputs=(log,), output=ours, part_bytes=300_000))
    preprocess_with_pandas(log, rival)
    require_equal_data(ours, rival)
    changed = pd.read_parquet(rival / "val.parquet")
    changed.loc[3, "C1"] += 1
    changed.to_parquet(rival / "val.parquet")
    with pytest.raises(Disagreement, match="val of comera-rec and pandas differ"):
        require_equal_data(ours, rival)
