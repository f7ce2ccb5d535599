"""Run benchmarks: `python -m benchmarks.run NAME [--quick] [--json FILE]`."""

import importlib
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click
import torch
from tqdm import tqdm

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.environment import results_path
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import format_case, read_rows, writing_rows
from benchmarks.harness.timing import Plan
from comera_rec.cli.errors import run_command
from data_pipeline.errors import UserError

# name -> (module and function, what it compares); the function yields the rows of each case.
BENCHMARKS = {
    "lookup": ("lookup.tables:run", "tables of a collection: dense, FBGEMM's fused, TT with and without dedup"),
    "linear": ("linear:run", "linear layers: nn.Linear and TTLinear"),
    "transformer": ("transformer:run", "training a six-encoder transformer: dense, low rank, TT"),
    "dlrm": ("dlrm:run", "a whole DLRM: dense, and 99 to 1,000 times smaller; resumes"),
    "gpu-dlrm": ("dlrm:run_steps", "steps of a whole DLRM: dense and TT, on a GPU also in a CUDA graph"),
    "step": ("step:run", "a training step part by part: Kaggle's DLRM, dense and TT; MLPerf's DLRM-DCNv2, TT, and its memory"),
    "preprocess": ("preprocess:run", "raw logs to a data set: comera preprocess, pandas, DuckDB, torchrec; resumes"),
    "drift": ("drift:run", "frequencies that drift: hot rows as they are, reranked, ordered right from the start"),
    "days": ("days:run", "daily retraining: continued, anew on all days, the first day only"),
    "serve": ("serve:run", "requests: packages of a TT model and TorchRec's quantized dense one"),
    "serve-http": ("serve_http:run", "one-row requests over HTTP: comera serve, Starlette, an echo, all under uvicorn"),
    "quality": ("quality.runs:run", "predictions of models whose tables take equal bytes; resumes"),
}
RESUMABLE = ("quality", "dlrm", "preprocess")
ON_GPU = ("lookup", "linear", "transformer", "gpu-dlrm")
_FILE = click.Path(path_type=Path, dir_okay=False)


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
@click.option("--only", default="", metavar="SIZE=VALUE,...", help="Only cases with these sizes, such as dim=64,batch=16384.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights and inputs.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="quality: implicit feedback, see benchmarks/quality/data_sets.py; preprocess: where to keep logs.",
)
@click.option("--no-memory", is_flag=True, help="Don't measure the peak extra memory of calls.")
def run(
    name: str, quick: bool, json_file: Path | None, save: bool, device: str, threads: int | None, seconds: float | None,
    only: str, seed: int, data: Path | None, no_memory: bool,
) -> int:  # fmt: skip
    """Measure all providers of a benchmark side by side, after checking that their results agree.

    A ratio is the baseline's median divided by the provider's: above 1 is less time, or less memory.

    \b
    Example:
      python -m benchmarks.run lookup --quick --json lookup.jsonl
      python -m benchmarks.run all --save
    """
    if save and (quick or (only and name not in RESUMABLE)):
        raise click.UsageError("--save keeps results of full runs: drop --quick and --only, or write the rows with --json")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UserError(f"--device is {device!r}: choose cpu, or cuda where torch sees a GPU")
    if device != "cpu" and name not in ON_GPU:
        raise UserError(f"{name} measures on CPUs: choose --device cpu, or one of {', '.join(ON_GPU)}")
    if threads is not None:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of child processes
    plan = Plan(warmup=1, min_rounds=5, max_rounds=5) if quick else Plan()
    if seconds is not None:
        plan = Plan(warmup=plan.warmup, min_rounds=plan.min_rounds, max_rounds=1_000_000, seconds=seconds)
    sizes = _sizes(only)
    settings = Settings(quick=quick, device=device, seed=seed, memory=not no_memory, only=sizes, plan=plan, data=data)
    if json_file and name == "all":
        json_file.unlink(missing_ok=True)  # all append their rows
    for chosen in BENCHMARKS if name == "all" else [name]:
        resumes = chosen in RESUMABLE
        append = {json_file: resumes or name == "all"} if json_file else {}
        if save:
            append[results_path(chosen, device)] = resumes
        try:
            _measure(chosen, settings, append)
        except Disagreement as error:
            click.echo(f"benchmarks.run: nothing timed, providers disagree: {' '.join(str(error).split())}", err=True)
            return 1
    if json_file:
        click.echo(f"wrote {json_file}")
    return 0


def _measure(name: str, settings: Settings, append: dict[Path, bool]) -> None:
    """Run a benchmark and write its rows to files, at their end where `append` says so; the last one has finished rows."""
    finished = [row for path in list(append)[-1:] if name in RESUMABLE and path.exists() for row in read_rows(path)]
    module, function = BENCHMARKS[name][0].split(":")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    with ExitStack() as files:
        writers = [files.enter_context(writing_rows(path, append=appends)) for path, appends in append.items()]
        for rows in measure(replace(settings, finished=finished)):
            for write in writers:
                write(rows)
            tqdm.write(format_case(rows) + "\n")


def _sizes(only: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in only.split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise click.UsageError(f"--only is {only!r}: write SIZE=VALUE, separated by commas")
    return {name.strip(): value.strip() for name, _, value in pairs}


if __name__ == "__main__":
    run_command(run, "python -m benchmarks.run")
