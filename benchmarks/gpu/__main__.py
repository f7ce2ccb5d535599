"""All GPU tests and benchmarks in one command: `python -m benchmarks.gpu`, or `make gpu`.

It runs the tests that need a GPU, and then every benchmark that the installed packages allow, within a time limit. Rows are kept
for each machine; what an earlier run measured isn't measured again.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import click
import torch

from benchmarks.harness.environment import FOLDER, machine_kind
from comera_rec.cli.errors import run_command
from data_pipeline.errors import UserError

PYTEST, TORCHREC = ("hypothesis", "pytest", "pytest_timeout", "xdist"), ("torchrec", "fbgemm_gpu")
NEEDS = {"tests": PYTEST, "tests with torchrec": PYTEST + TORCHREC, "gpu-dlrm": TORCHREC}
TESTS = {
    "tests": ["tests/ops/test_bags_triton.py", "tests/nn/test_embedding_bag_gpu.py"],
    "tests with torchrec": ["tests/recsys/test_collection_gpu.py", "tests/training/test_capture.py", "tests/data/test_batches.py"],
}
ONLY = {"lookup": [], "linear": ["--only", "in=1024,out=1024"], "transformer": ["--only", "batch=64"], "gpu-dlrm": []}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to check in small cases that everything runs.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="For the whole run.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Default benchmarks/results/<machine kind>/gpu.")
def main(device: str, minutes: float, output: Path | None) -> int:
    """Run every GPU test and benchmark that the installed packages allow; run it again to resume.

    \b
    Example:
      python -m benchmarks.gpu
      python -m benchmarks.gpu --device cpu --output /tmp/gpu
    """
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    if device != "cpu" and not on_gpu:
        raise UserError(f"--device is {device!r}, and torch {torch.__version__} sees no GPU: install its CUDA build, or give cpu")
    if device == "cpu" and output is None:
        raise click.UsageError("--device cpu measures nothing worth keeping: name a folder with --output")
    deadline = time.monotonic() + 60 * minutes
    folder = output or FOLDER / "results" / machine_kind(device) / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {machine_kind(device)}; rows: {folder}")
    # Warnings of package versions that the project doesn't pin are not failures here. Without a GPU, tests are only collected.
    tests = ["pytest", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu", *([] if on_gpu else ["--collect-only"])]
    commands = {name: [*tests, *files] for name, files in TESTS.items()}
    for name, only in ONLY.items():
        how = ["--seconds", "1", *only] if on_gpu else ["--quick", "--seconds", "0", "--no-memory"]
        commands[name] = ["benchmarks.run", name, "--device", device, *how, "--json", str(folder / f"{name}.jsonl")]
    outcomes = {name: _run(command, folder / f"{name}.jsonl", NEEDS.get(name, ()), deadline) for name, command in commands.items()}
    for name, outcome in outcomes.items():
        click.echo(f"{name}: {outcome}")
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def _run(command: list[str], rows: Path, needs: tuple[str, ...], deadline: float) -> str:
    """Run a module unless its rows exist, which it writes when it is finished; return the outcome in a few words."""
    if rows.exists():
        return "kept from an earlier run"
    if lacking := [package for package in needs if importlib.util.find_spec(package) is None]:
        return f"left out: install {', '.join(lacking)}"
    start = time.monotonic()
    try:
        command = [sys.executable, "-m", *command]
        status = subprocess.run(command, timeout=max(0, deadline - start), cwd=FOLDER.parent).returncode
    except subprocess.TimeoutExpired:
        return "out of time: run the command again to resume"
    return f"failed with status {status}" if status else f"{time.monotonic() - start:.0f} s"


if __name__ == "__main__":
    run_command(main, "python -m benchmarks.gpu")
