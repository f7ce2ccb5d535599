"""The GPU suite from end to end on a CPU, its page, and the model of GPUs that aren't present."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.static import GPUS, Kernel, StaticCase, run
from benchmarks.gpu.verdict import GOALS, verdict
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(gpu.main, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.return_value, result.output


def test_the_suite_runs_on_a_cpu_and_resumes(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--quick", "--output", str(tmp_path), "--only", "gpu-lookup,float8")
    status, page = invoke(*arguments)
    assert status == 0, page
    rows = gpu.kept_rows(tmp_path, "gpu-lookup")
    assert {row.provider for row in rows} >= {"nn.EmbeddingBag sparse", "TT tables"}
    assert "transformer, whole step" in page
    assert "not asked for" in page
    status, page = invoke(*arguments)
    assert status == 0, page
    assert page.count("kept from an earlier run") >= 2


@pytest.mark.slow
def test_every_step_of_the_suite_runs_on_a_cpu(tmp_path: Path) -> None:
    status, page = invoke("--device", "cpu", "--quick", "--output", str(tmp_path))
    assert status == 0, page


def test_missing_failed_and_late_steps_are_reported(tmp_path: Path) -> None:
    now = gpu.time.monotonic()
    step = gpu.Step(name="x", command=["false"], needs=("no_such_package",), seconds=30)
    assert gpu.run_step(step, tmp_path, now + 60, fresh=False) == "left out: install no_such_package"
    step = dataclasses.replace(step, needs=())
    assert gpu.run_step(step, tmp_path, now, fresh=False) == "out of time: run the command again to resume"
    assert gpu.run_step(step, tmp_path, now + 60, fresh=False).startswith("failed with status 1: no output")
    assert gpu.run_step(dataclasses.replace(step, command=["sleep", "9"], seconds=0.1), tmp_path, now + 60, fresh=False)
    assert gpu.kept_rows(tmp_path, "x") == []


def test_mistakes_are_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--device is 'tpu', and torch .* sees no GPU: install its CUDA build, or give cpu"):
        invoke("--device", "tpu")
    with pytest.raises(Exception, match="name a folder with --output"):
        invoke("--device", "cpu")
    with pytest.raises(Exception, match="--only names lookups: choose from tests, gpu-lookup"):
        invoke("--device", "cpu", "--output", str(tmp_path), "--only", "lookups")


def row(step: str, provider: str, shapes: dict[str, object], ratios: dict[str, float], pass_: str = "step") -> Row:
    return Row(
        op=step, provider=provider, shapes=shapes, dtype="float32", pass_=pass_, p20=1.0, p50=1.0, p80=1.0, unit="ms", samples=1,
        ratios=ratios, device="cuda", machine="nvidia-h200", versions={}, threads=1, commit="", seed=0, date="",
    )  # fmt: skip


def test_a_goal_is_met_only_where_every_size_meets_it() -> None:
    sizes = {"order": 2, "batch": 1, "dim": 64, "rank": 16}
    rows = [row("gpu-lookup", "TT tables, CUDA graph", sizes, {"FBGEMM": ratio}) for ratio in (0.9, 1.2)]
    page = verdict(rows, {}, "nvidia-h200")
    assert "0.90x  missed" in page
    assert "met" in verdict(rows[1:], {}, "nvidia-h200")
    assert page.count("not measured") == len(GOALS) - 1


def test_the_model_yields_a_row_for_each_step_and_kernel() -> None:
    (rows,) = run(Settings(quick=True))
    steps = {row.provider: row for row in rows if not row.provider.endswith("(kernel)")}
    assert set(steps) == {"TT", "FBGEMM", "FBGEMM, Adagrad"}
    for row_ in steps.values():
        alone = [row_.counted[f"{limit} ms"] for limit in ("memory", "issue", "kernels")]
        assert max(alone) <= row_.p50 <= sum(alone)
    assert all(row_.counted["spilled bytes"] == 0 for row_ in rows if row_.provider.endswith("(kernel)"))
    assert json.loads(rows[0].to_json())["pass"] == "estimate"


def test_a_kernels_time_is_its_slowest_limit() -> None:
    fast, slow = GPUS["B200"], GPUS["A100"]
    assert Kernel(name="", kernels=3, bytes=8.0).seconds(fast) == pytest.approx(6e-6)
    large = Kernel(name="", kernels=1, bytes=1e9)
    assert large.seconds(slow) / large.seconds(fast) == pytest.approx(fast.bytes_per_s / slow.bytes_per_s)


def test_the_goals_sizes_are_compressed_enough() -> None:
    assert all(StaticCase(gpu="H100", batch=16_384, dim=dim).compression >= 99 for dim in (64, 128))


def test_what_needs_no_torchrec_runs_without_it() -> None:
    modules = ("gpu.__main__", "gpu.lookup", "linear.layers", "linear.float8", "linear.transformer")
    code = "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
    code += "".join(f"import benchmarks.{module}\n" for module in modules) + "import tests.conftest\n"
    run = subprocess.run([sys.executable, "-c", code], cwd=gpu.FOLDER.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
