"""All GPU tests and benchmarks in one command: `python -m benchmarks.gpu`, or `make gpu`.

It runs the tests that need a GPU, and then every benchmark that the installed packages allow, within a time limit, and prints their
tables. Rows are kept for each machine; what an earlier run measured isn't measured again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from benchmarks.harness.cli import run_command
from benchmarks.harness.environment import FOLDER, machine_kind
from data_pipeline.errors import UserError

TORCHREC = ("torchrec", "fbgemm_gpu")
TESTS = ("hypothesis", "pytest", "pytest_timeout", "xdist")
TEST_FILES = (
    "ops/test_bags_triton.py",
    "nn/test_embedding_bag_gpu.py",
)
TORCHREC_TEST_FILES = ("training/test_capture.py", "data/test_batches.py")
LEAST_SECONDS = 15  # remaining time in which a step is worth starting


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of the suite, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    seconds: float


def steps(device: str, quick: bool) -> list[Step]:
    """The suite's steps, the most important first."""
    python = [sys.executable, "-m"]
    on_gpu = device.startswith("cuda")
    files = [*TEST_FILES, *(TORCHREC_TEST_FILES if not missing(TORCHREC) else ())]
    # Warnings of package versions that the project doesn't pin are not failures here. Without a GPU, tests are only collected.
    tests = [*python, "pytest", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu", *([] if on_gpu else ["--collect-only"])]
    how = ["--device", device, *(["--quick", "--seconds", "0", "--no-memory"] if quick else ["--seconds", "1"])]

    def benchmark(name: str, only: str = "") -> list[str]:
        return [*python, "benchmarks.run", name, *how, *(["--only", only] if only and not quick else [])]

    made = [
        Step(name="tests", command=[*tests, *(str(FOLDER.parent / "tests" / file) for file in files)], needs=TESTS, seconds=240),
        Step(name="lookup", command=benchmark("lookup"), seconds=180),
        Step(name="linear", command=benchmark("linear", "in=1024,out=1024"), seconds=90),
        Step(name="transformer", command=benchmark("transformer", "batch=64"), seconds=90),
        Step(name="gpu-dlrm", command=benchmark("gpu-dlrm"), needs=TORCHREC, seconds=240),
    ]
    patience = 1 if on_gpu else 4  # a CPU may be shared, and only shows that everything runs
    return [replace(step, seconds=patience * step.seconds) for step in made]


def missing(packages: Sequence[str]) -> list[str]:
    """The packages that can't be imported."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to check that everything runs.")
@click.option("--quick", is_flag=True, help="Small cases, few rounds.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="For the whole run.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Default benchmarks/results/<machine kind>/gpu.")
def main(device: str, quick: bool, minutes: float, output: Path | None) -> int:
    """Run every GPU test and benchmark that the installed packages allow; run it again to resume.

    \b
    Example:
      python -m benchmarks.gpu
      python -m benchmarks.gpu --device cpu --quick --output /tmp/gpu
    """
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UserError(f"--device is {device!r}, and torch {torch.__version__} sees no GPU: install its CUDA build, or give cpu")
    if (quick or device == "cpu") and output is None:
        raise click.UsageError("--quick and --device cpu measure nothing worth keeping: name a folder with --output")
    deadline = time.monotonic() + 60 * minutes
    folder = output or FOLDER / "results" / machine_kind(device) / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {machine_kind(device)}")
    failed = False
    for step in steps(device, quick):
        note = run_step(step, folder, deadline)
        failed = failed or note.startswith("failed")
        if (log := folder / f"{step.name}.log").exists() and step.name != "tests":
            click.echo(log.read_text())
        click.echo(f"{step.name}: {note}\n")
    click.echo(f"rows and logs: {folder}")
    return 1 if failed else 0


def run_step(step: Step, folder: Path, deadline: float) -> str:
    """Run a step unless an earlier run did; return its outcome in a few words."""
    rows, log = folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    if rows.exists():
        return "kept from an earlier run"
    if lacking := missing(step.needs):
        return f"left out: install {', '.join(lacking)}"
    seconds = min(step.seconds, deadline - time.monotonic())
    if seconds < LEAST_SECONDS:
        return "out of time: run the command again to resume"
    options = ["--json", str(rows)] if "benchmarks.run" in step.command else []
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    started = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [*step.command, *options], stdout=file, stderr=subprocess.STDOUT, timeout=seconds, cwd=FOLDER.parent,
                env={**os.environ, "PYTHONPATH": path},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"failed: not finished after {seconds:.0f} s, see {log}"
    if status:
        lines = log.read_text().strip().splitlines() or ["no output"]
        return f"failed with status {status}: {lines[-1]} (see {log})"
    return f"{time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    run_command(main, "benchmarks.gpu")
