"""The GPU suite from end to end on a CPU: its steps, what it leaves out, and what it resumes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")

from benchmarks.gpu import __main__ as gpu


@pytest.mark.slow
def test_every_step_of_the_suite_runs_on_a_cpu(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu.main, ["--device", "cpu", "--quick", "--output", str(tmp_path)], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {"lookup", "linear", "transformer", "gpu-dlrm"}


def test_missing_failed_finished_and_late_steps_are_reported(tmp_path: Path) -> None:
    now = gpu.time.monotonic()
    step = gpu.Step(name="x", command=["false"], needs=("no_such_package",), seconds=30)
    assert gpu.run_step(step, tmp_path, now + 60) == "left out: install no_such_package"
    step = dataclasses.replace(step, needs=())
    assert gpu.run_step(step, tmp_path, now) == "out of time: run the command again to resume"
    assert gpu.run_step(step, tmp_path, now + 60).startswith("failed with status 1: no output")
    (tmp_path / "x.jsonl").touch()
    assert gpu.run_step(step, tmp_path, now + 60) == "kept from an earlier run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], r"--device is 'tpu', and torch .* sees no GPU: install its CUDA build, or give cpu"),
        (["--device", "cpu"], "name a folder with --output"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(gpu.main, arguments, standalone_mode=False)
    with pytest.raises(Exception, match=message):
        raise result.exception or AssertionError(result.output)


def test_what_needs_no_torchrec_runs_without_it() -> None:
    code = (
        "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        "import benchmarks.gpu.__main__, benchmarks.linear, benchmarks.transformer, tests.conftest\n"
        "from benchmarks.lookup.tables import ON_GPU, LookupCase, LookupWorkload\n"
        "workload = LookupWorkload(LookupCase(rows=(50,), dim=4, batch=2, providers=ON_GPU[:3]), 'cpu', 0)\n"
        "assert list(workload.providers) == ['nn.EmbeddingBag sparse', 'TT tables'], workload.left_out\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=gpu.FOLDER.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
