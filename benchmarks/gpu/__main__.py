"""All GPU tests and benchmarks in one command: `python -m benchmarks.gpu`, or `make gpu`.

It checks the environment, runs the tests that need a GPU, measures the machine's ceilings, and then runs every benchmark that the
installed packages allow, within a time limit. Rows are kept for each machine; what an earlier run measured isn't measured again. At
the end it prints a page: each goal, what was measured, and what the model in `static.py` predicted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from benchmarks.gpu.verdict import verdict
from benchmarks.harness.cli import run_command
from benchmarks.harness.environment import FOLDER, machine_kind
from benchmarks.harness.limits import ceilings
from benchmarks.harness.rows import Row, read_rows

TORCHREC = ("torchrec", "fbgemm_gpu")
PACKAGES = {
    "triton": "our kernels", "numba": "preprocessing", "torchrec": "collections, DLRM", "fbgemm_gpu": "the rival",
    "pytest": "tests", "hypothesis": "tests", "xdist": "tests", "pytest_timeout": "tests",
}  # fmt: skip
TESTS = ("hypothesis", "pytest", "pytest_timeout", "xdist")
TEST_FILES = (
    "ops/test_float8_matmul.py",
    "ops/test_bags_triton.py",
    "nn/test_embedding_bag_gpu.py",
)
TORCHREC_TEST_FILES = ("training/test_capture.py", "training/test_batches.py")
LEAST_SECONDS = 15  # remaining time in which a step is worth starting


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of the suite."""

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    seconds: float
    """At most."""


def steps(device: str, quick: bool) -> list[Step]:
    """The suite's steps, the most important first."""
    python = [sys.executable, "-m"]
    on_gpu = device.startswith("cuda")
    files = [*TEST_FILES, *(TORCHREC_TEST_FILES if not missing(TORCHREC) else ())]
    # Warnings of package versions that the project doesn't pin are not failures here. Without a GPU, tests are only collected.
    tests = [*python, "pytest", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu", *([] if on_gpu else ["--collect-only"])]
    measured = [*python, "benchmarks.run"]
    how = ["--device", device, "--no-memory", *(["--quick", "--seconds", "0"] if quick else ["--seconds", "1"])]

    def benchmark(name: str, only: str = "") -> list[str]:
        return [*measured, name, *how, *(["--only", only] if only and not quick else [])]

    patience = 1 if on_gpu else 4  # a CPU may be shared, and only shows that everything runs
    made = [
        Step(name="tests", command=[*tests, *(str(FOLDER.parent / "tests" / file) for file in files)], needs=TESTS, seconds=240),
        Step(name="gpu-lookup", command=benchmark("gpu-lookup"), seconds=180),
        Step(name="linear", command=benchmark("linear", "in=1024,out=1024"), seconds=90),
        Step(name="float8", command=benchmark("float8"), seconds=60),
        Step(name="transformer", command=benchmark("transformer", "batch=64"), seconds=90),
        Step(name="gpu-dlrm", command=benchmark("gpu-dlrm"), needs=TORCHREC, seconds=240),
    ]
    return [replace(step, seconds=patience * step.seconds) for step in made]


def missing(packages: Sequence[str]) -> list[str]:
    """The packages that can't be imported."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to check that everything runs.")
@click.option("--quick", is_flag=True, help="Small cases, few rounds.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="For the whole run.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Default benchmarks/results/<machine kind>/gpu.")
@click.option("--only", default="", metavar="STEP,...", help="Only these steps.")
@click.option("--fresh", is_flag=True, help="Repeat what an earlier run has measured.")
def main(device: str, quick: bool, minutes: float, output: Path | None, only: str, fresh: bool) -> int:
    """Run every GPU test and benchmark that the installed packages allow; run it again to resume.

    \b
    Example:
      python -m benchmarks.gpu
      python -m benchmarks.gpu --device cpu --quick --output /tmp/gpu
    """
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"--device is {device!r}, and torch {torch.__version__} sees no GPU: install its CUDA build, or give cpu")
    if (quick or device == "cpu") and output is None:
        raise click.UsageError("--quick and --device cpu measure nothing worth keeping: name a folder with --output")
    deadline = time.monotonic() + 60 * minutes
    chosen = steps(device, quick)
    if unknown := set(filter(None, only.split(","))) - {step.name for step in chosen}:
        raise click.UsageError(f"--only names {', '.join(sorted(unknown))}: choose from {', '.join(step.name for step in chosen)}")
    folder = output or FOLDER / "results" / machine_kind(device) / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(describe_environment(device))
    failed = False
    notes: dict[str, str] = {}
    for step in chosen:
        if only and step.name not in only.split(","):
            notes[step.name] = "not asked for"
            continue
        notes[step.name] = run_step(step, folder, deadline, fresh=fresh)
        click.echo(f"{step.name}: {notes[step.name]}")
        failed = failed or notes[step.name].startswith("failed")
    rows = [row for step in chosen for row in kept_rows(folder, step.name)]
    click.echo("\n" + verdict(rows, notes, machine_kind(device)))
    click.echo(f"\nrows and logs: {folder}")
    return 1 if failed else 0


def describe_environment(device: str) -> str:
    """Describe versions, missing packages, and the machine's ceilings."""
    lines = [f"torch {torch.__version__}, Python {sys.version.split()[0]}, {machine_kind(device)}"]
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        major, minor = torch.cuda.get_device_capability(device)
        lines.append(f"compute capability {major}.{minor}, {properties.total_memory / 2**30:.0f} GiB")
    lines += [f"without {name}: no {what}" for name, what in PACKAGES.items() if missing([name])]
    limits = ceilings(device)
    lines.append(
        f"ceilings: copies {limits.bytes_per_s / 1e9:.0f} GB/s, float32 products {2e-9 * limits.multiply_adds_per_s:.0f} GFLOP/s"
    )
    return "\n".join(lines)


def run_step(step: Step, folder: Path, deadline: float, *, fresh: bool) -> str:
    """Run a step unless an earlier run did; return its outcome in a few words."""
    done, log = folder / f"{step.name}.done", folder / f"{step.name}.log"
    if done.exists() and not fresh:
        return f"kept from an earlier run, {json.loads(done.read_text())['note']}"
    if lacking := missing(step.needs):
        return f"left out: install {', '.join(lacking)}"
    seconds = min(step.seconds, deadline - time.monotonic())
    if seconds < LEAST_SECONDS:
        return "out of time: run the command again to resume"
    rows = ["--json", str(folder / f"{step.name}.jsonl")] if "benchmarks.run" in step.command else []
    started = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [*step.command, *rows], stdout=file, stderr=subprocess.STDOUT, timeout=seconds, cwd=FOLDER.parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"failed: not finished after {seconds:.0f} s, see {log}"
    if status:
        lines = log.read_text().strip().splitlines() or ["no output"]
        return f"failed with status {status}: {lines[-1]} (see {log})"
    note = f"{time.monotonic() - started:.0f} s"
    done.write_text(json.dumps({"note": note}) + "\n")
    return note


def kept_rows(folder: Path, name: str) -> list[Row]:
    """The rows of a finished step."""
    path = folder / f"{name}.jsonl"
    return read_rows(path) if path.exists() and (folder / f"{name}.done").exists() else []


if __name__ == "__main__":
    run_command(main, "benchmarks.gpu")
