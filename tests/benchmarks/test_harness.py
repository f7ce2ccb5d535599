"""The benchmark harness: agreement, cases, mistakes, and small runs from end to end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from refusals import refuse

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.measure import Settings, chosen, measure_case
from benchmarks.harness.rows import read_rows, writing_rows
from benchmarks.harness.timing import Plan
from benchmarks.linear import LinearCase
from benchmarks.lookup.tables import FBGEMM, ON_CPU, OURS, TT, LookupCase, LookupWorkload
from benchmarks.run import BENCHMARKS, RESUMABLE, run
from comera_rec.cli.errors import run_command

SMALL_LINEAR = LinearCase(batch=6, in_features=17, out_features=12, rank=3)
FAST = ("linear", "transformer")
FEW = Settings(plan=Plan(warmup=1, min_rounds=2, max_rounds=2), memory=False)
SMALL = LookupCase(rows=(1009, 53), dim=8, order=3, rank=4, batch=16, bag=3, providers=(*ON_CPU, TT))


def test_a_failed_run_leaves_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("rows of another run\n")
    with pytest.raises(RuntimeError, match="on the way"), writing_rows(tmp_path / "rows.jsonl"):
        raise RuntimeError("on the way")
    assert (tmp_path / "rows.jsonl").read_text() == "rows of another run\n"


def test_wrong_values_do_not_pass() -> None:
    reference = {"output": torch.ones(3, dtype=torch.float64), "gradient": torch.arange(3, dtype=torch.float64)}
    for outcome, message in (
        ({"output": torch.tensor([1.0, 1.001, 1.0])}, "bad: output is off by 0.001 where values reach 1"),
        ({"output": torch.tensor([1.0, torch.nan, 1.0])}, "bad: output is off by nan"),
        ({"output": torch.ones(3), "gradient": torch.zeros(3)}, "bad: gradient is off by 2"),
        ({"output": torch.ones(3), "gradients": torch.ones(3)}, "shows gradients, which the reference lacks"),
        ({"gradient": torch.arange(3.0)}, "bad shows no output"),
    ):
        with pytest.raises(Disagreement, match=message):
            require_agreement(reference, {"good": {"output": torch.ones(3)}, "bad": outcome})


def test_cases_are_chosen_by_their_sizes() -> None:
    cases = [SMALL_LINEAR, replace(SMALL_LINEAR, batch=8), replace(SMALL_LINEAR, batch=8, in_features=9)]
    assert chosen(cases, {}) == cases
    assert chosen(cases, {"batch": "8", "in": "17"}) == [cases[1]]
    refuse(r"no case has {'batch': '7'}: sizes are {'batch': \['6'\]", chosen, [SMALL_LINEAR], {"batch": "7"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lokup"], "'lokup' is not one of 'lookup', 'linear', "),
        (["linear", "--only", "batch"], "--only is 'batch': write SIZE=VALUE"),
        (["linear", "--only", "batch=128", "--save"], "--save keeps results of full runs: drop --quick and --only"),
        (["linear", "--json", "/nowhere/x.jsonl"], "no folder /nowhere for x.jsonl: create it first"),
        (["linear", "--device", "tpu"], "--device is 'tpu': choose cpu"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(run, "python -m benchmarks.run", arguments)
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BENCHMARKS])
def test_a_quick_run_yields_rows(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = [name, "--quick", "--seconds", "0", "--no-memory", "--json", str(file)]
    CliRunner().invoke(run, arguments, standalone_mode=False, catch_exceptions=False)
    rows = read_rows(file)
    assert {row.op for row in rows} == {name}
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
