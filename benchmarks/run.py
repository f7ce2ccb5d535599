"""Run benchmarks: `python -m benchmarks.run NAME [--quick] [--json FILE]`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from tqdm import tqdm

from benchmarks.harness.cli import run_command
from benchmarks.harness.environment import results_path
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import RowWriter, read_rows
from benchmarks.harness.text import format_case
from benchmarks.harness.timing import Plan

# name -> (module, what it compares); the module's `run(settings)` yields the rows of each case.
BENCHMARKS = {
    "lookup": (
        "benchmarks.lookup.criteo_tables",
        "tables of a collection: dense, FBGEMM's fused, TT with and without dedup",
    ),
    "lookup-scaling": ("benchmarks.lookup.scaling", "the same for several batch sizes and skews of the ids"),
    "lookup-memory": ("benchmarks.lookup.memory", "peak memory of training a table of 100 million rows"),
    "hot-rows": ("benchmarks.lookup.hot_rows", "TT tables of equal bytes, with and without hot rows"),
    "distributed": ("benchmarks.sharding.distributed", "a sharded table: what each way of sharding sends, and its step"),
    "trainer-loop": ("benchmarks.training.loop", "steps of the trainer and of a hand-written TorchRec loop, on two processes"),
    "planned": ("benchmarks.sharding.planned", "the planner's estimates, and measured memory and steps of 1, 2 and 4 processes"),
    "scale-model": ("benchmarks.sharding.scale_model", "a model of steps on 8 to 512 GPUs, from counted bytes and multiply-adds"),
    "sharding-grid": ("benchmarks.sharding.grid", "the planner's estimates and choice: where copies of cores beat moving bags"),
    "preprocess": ("benchmarks.data.preprocess", "raw logs to a data set: comera preprocess, pandas, torchrec; resumes"),
    "preprocess-memory": ("benchmarks.data.memory", "peak memory of comera preprocess and its limit, by kind of log; resumes"),
    "preprocess-formats": ("benchmarks.data.formats", "comera preprocess of one log as text, quoted CSV, JSON lines and Parquet"),
    "loader": ("benchmarks.data.loader", "a data set to training batches"),
    "ordering": ("benchmarks.lookup.ordering", "ids by frequency, by communities, at random: unique digits, and the lookup"),
    "linear": ("benchmarks.linear.layers", "linear layers: nn.Linear and TTLinear"),
    "transformer": (
        "benchmarks.linear.transformer",
        "training a six-encoder transformer: dense, GaLore in three forms, LTE, low rank, TT",
    ),
    "conversion": ("benchmarks.lookup.conversion", "peak memory of TT-SVD of a table of 10 million rows, besides the table"),
    "dlrm": ("benchmarks.training.dlrm", "a whole DLRM: dense, and 99 to 1,000 times smaller; resumes"),
    "mlperf": (
        "benchmarks.training.mlperf",
        "MLPerf's DLRM-DCNv2 at its original sizes, tables 1,000 times smaller: a step part by part, peak memory",
    ),
    "serve": ("benchmarks.serving.packages", "requests: packages of a TT model and TorchRec's quantized dense one"),
    "serve-http": ("benchmarks.serving.http", "requests to comera serve over HTTP from wrk, and their p99"),
    "gpu-lookup": ("benchmarks.gpu.lookup", "the lookup on a GPU: dense, FBGEMM, TT tables with and without a CUDA graph"),
    "float8": ("benchmarks.linear.float8", "matrix products: float32, bfloat16, float8"),
    "gpu-dlrm": (
        "benchmarks.gpu.dlrm",
        "steps of a whole DLRM: dense, TT, TT in a CUDA graph; `--device cpu` omits the graph",
    ),
    "gpu-static": ("benchmarks.gpu.static", "a model of the lookup's step on GPUs from compiled kernels; nothing is measured"),
    "sst2": ("benchmarks.text.sst2", "SST-2 from scratch: dense, TT, low rank, LTE, GaLore; needs --data; resumes"),
    "code": ("benchmarks.text.code", "masked-language pre-training on Python's library: dense, and TT four times smaller; resumes"),
    "quality": ("benchmarks.quality.runs", "predictions of models whose tables take equal bytes; resumes"),
}
RESUMABLE = ("quality", "dlrm", "preprocess", "preprocess-memory", "sst2", "code")
NEED_DATA = ("sst2",)  # skipped by `all` without --data
_FILE = click.Path(path_type=Path)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="\b\nBenchmarks:\n" + "\n".join(f"  {name:<16} {summary}" for name, (_, summary) in BENCHMARKS.items()),
)
@click.argument("name", metavar="NAME", type=click.Choice([*BENCHMARKS, "all"]))
@click.option("--quick", is_flag=True, help="Small cases, few rounds: a check in seconds that everything runs.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the rows to FILE as JSON lines.")
@click.option("--save", is_flag=True, help="Keep the rows under benchmarks/results/<machine kind>/, one file per benchmark.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; default all cores.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Time for each pass of each case, at least 10 rounds; default 6.")
@click.option("--only", default="", metavar="SIZE=VALUE,...", help="Only cases with these sizes, such as dim=64,batch=20000.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights and inputs.")
@click.option(
    "--data",
    type=_FILE,
    metavar="FOLDER",
    help="quality: implicit feedback, see benchmarks/quality/data_sets.py; sst2: its TSV files; preprocess: where to keep logs.",
)
@click.option("--no-memory", is_flag=True, help="Don't measure peak extra memory, which takes a process for each provider.")
def run(
    name: str,
    quick: bool,
    json_file: Path | None,
    save: bool,
    device: str,
    threads: int | None,
    seconds: float | None,
    only: str,
    seed: int,
    data: Path | None,
    no_memory: bool,
) -> None:
    """Measure all providers of a benchmark side by side, after checking that their results agree.

    A ratio is the baseline's median divided by the provider's: above 1 is less time, or less memory.

    \b
    Example:
      python -m benchmarks.run lookup --quick --json lookup.jsonl
      python -m benchmarks.run all --save
    """
    if quick and save:
        raise click.UsageError("--save keeps results of full runs: drop --quick, or write the rows with --json")
    if only and save and name not in RESUMABLE:
        raise click.UsageError("--save keeps results of full runs: drop --only, or write the rows with --json")
    if threads is not None:
        torch.set_num_threads(threads)
    plan = Plan(warmup=1, min_rounds=5, max_rounds=5) if quick else Plan()
    if seconds is not None:
        plan = Plan(warmup=plan.warmup, min_rounds=plan.min_rounds, max_rounds=1_000_000, seconds=seconds)
    settings = Settings(
        quick=quick, device=_require_device(device), seed=seed, memory=not no_memory, only=_sizes(only), plan=plan, data=data
    )
    with contextlib.ExitStack() as stack:
        if json_file and name in RESUMABLE and json_file.exists():
            settings = replace(settings, finished=read_rows(json_file))
        everything = stack.enter_context(RowWriter(json_file, append=name in RESUMABLE)) if json_file else None
        for chosen in [each for each in BENCHMARKS if data or each not in NEED_DATA] if name == "all" else [name]:
            with contextlib.ExitStack() as inner:
                resumable = chosen in RESUMABLE
                path = results_path(chosen, device)
                kept = inner.enter_context(RowWriter(_made(path), append=resumable)) if save else None
                if kept and resumable:
                    settings = replace(settings, finished=read_rows(path))
                module = importlib.import_module(BENCHMARKS[chosen][0])
                rows: Iterator[list] = module.run(settings)
                for case in rows:
                    for writer in filter(None, (everything, kept)):
                        writer.write(case)
                    tqdm.write(getattr(module, "format_case", format_case)(case) + "\n")
    if json_file:
        click.echo(f"wrote {json_file}")


def _require_device(device: str) -> str:
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(
            f"--device is {device!r}: choose cpu" + (" or cuda" if torch.cuda.is_available() else ", torch sees no GPU")
        )
    return device


def _sizes(only: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in only.split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise click.UsageError(f"--only is {only!r}: write SIZE=VALUE, separated by commas")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    run_command(run, "benchmarks.run")
