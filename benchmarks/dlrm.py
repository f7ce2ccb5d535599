"""A whole DLRM on synthetic Criteo logs of Kaggle's cardinalities: dense, and 99 to 1,000 times smaller, MLPs included.

Every run is `comera train --config examples/kaggle.toml` in its own process. Each form tries the learning rates of its tables with
seed 0 at each compression; the other seeds use the rate with the best NE on the validation split. Each run yields one row: NE on
the test split; `counted` has the best NE and AUC that any model can reach there, ms per step and peak MiB.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import FOLDER, comera
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.trainings import Trained, train_all
from benchmarks.harness.workload import Given
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

CONFIG = FOLDER.parent / "examples" / "kaggle.toml"


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the model: its settings, the key of its tables' learning rate, and the rates to choose from."""

    overrides: tuple[str, ...]
    key: str
    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Rows of the log, scale of its cardinalities, occurrences that a value needs to be kept, a run's length, and compressions."""

    data: str
    rows: int
    scale: float
    min_count: int
    batch: int
    steps: int
    early: int
    late: int
    compressions: tuple[int, ...]
    forms: tuple[str, ...] = ("dense", "TT adaptive", "TT + rows adaptive")


DENSE = ("tables.format=dense", "linears.format=dense", "ranks=none")
FORMS = {
    "dense": Form(overrides=DENSE, key="optimizer.lr_tables", rates=(0.0125, 0.025, 0.05, 0.1)),
    "dense + MLP rate": Form(overrides=(*DENSE, "optimizer.lr_tables=0.05"), key="optimizer.lr_dense", rates=(0.001, 0.004, 0.008)),
    "TT adaptive": Form(overrides=("tables.hot_rows=0",), key="optimizer.lr_cores", rates=(0.0015, 0.003, 0.006, 0.01)),
    "TT + rows adaptive": Form(overrides=("tables.hot_rows=auto",), key="optimizer.lr_cores", rates=(0.0008, 0.0015, 0.003, 0.006)),
}  # fmt: skip
SIZES = (
    Size(
        data="synth", rows=1_000_000, scale=1.0, min_count=2, batch=2048, steps=390, early=80, late=120, compressions=(99,),
    ),
    Size(
        data="synth-10M", rows=10_000_000, scale=1.0, min_count=1, batch=2048, steps=1000, early=200, late=300,
        compressions=(99, 500, 1000), forms=("dense", "dense + MLP rate", "TT + rows adaptive"),
    ),
)  # fmt: skip
QUICK = tuple(replace(size, rows=20_000, scale=0.02, batch=128, steps=40, early=10, late=20, compressions=(20,)) for size in SIZES)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the runs not in `settings.finished`, one row each."""
    rows = list(settings.finished)
    for size in QUICK if settings.quick else SIZES:
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            data = cache(partial(prepare, Path(folder), size))  # not called if all runs are finished
            yield from train_all("dlrm", _cases(size, settings), partial(_measured, size, data), settings, rows)


def run_steps(settings: Settings) -> Iterator[list[Row]]:
    """Yield the trainer's medians of steps: dense, TT, and on a GPU both in a CUDA graph. Nothing is tuned; rates are constant."""
    size = QUICK[0] if settings.quick else replace(SIZES[0], rows=400_000, batch=16_384, steps=120, early=20, late=20)
    forms = {"dense": FORMS["dense"], "TT": FORMS["TT + rows adaptive"]}
    fast = FORMS["TT adaptive"]  # as tables are fastest on a GPU: order 2, without hot rows
    forms["TT of order 2"] = replace(fast, overrides=(*fast.overrides, "tables.order=2"))
    if settings.device.startswith("cuda"):
        forms |= {f"{name}, CUDA graph": form for name, form in forms.items()}
    compression = size.compressions[0]
    whole = Given(values={"rows": size.rows, "batch": size.batch, "steps": size.steps, "compression": compression})
    for _, rows in each_case("gpu-dlrm", [whole], settings):
        counted: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            data, _ = prepare(Path(folder), size)
            for name, form in forms.items():
                capture = str("graph" in name).lower()
                where = (f"training.device={settings.device}", f"training.capture={capture}", "optimizer.decay=0")
                form, output = replace(form, overrides=form.overrides + where), Path(folder, name)
                counted[name] = train(output, data, size, compression, form, form.rates[2], settings.seed)
        times = {name: [of.pop("step_ms")] for name, of in counted.items()}
        yield rows("step", "ms", times, counted, ("dense", "TT"))


def _measured(size: Size, prepared: Callable[[], tuple[Path, dict[str, float]]], shapes: dict[str, Any], seed: int) -> Trained:
    data, reachable = prepared()
    form, output = FORMS[shapes["method"]], Path(tempfile.mkdtemp(dir=data.parent), "run")
    counted = train(output, data, size, shapes["compression"], form, shapes["lr"], seed)
    return counted.pop("ne"), counted | reachable


def _cases(size: Size, settings: Settings) -> list[tuple[dict[str, Any], Sequence[float]]]:
    """The forms at each compression, but dense ones at one, with the rates to try."""
    forms = {name: form for name, form in FORMS.items() if name in size.forms}
    return [
        (
            {"data": size.data, "method": name, "compression": compression, "steps": size.steps},
            form.rates[: 1 if settings.quick else None],
        )
        for compression in size.compressions
        for name, form in forms.items()
        if compression == size.compressions[0] or not name.startswith("dense")
    ]


def prepare(folder: Path, size: Size) -> tuple[Path, dict[str, float]]:
    """Prepare the data set; return it with the best NE and AUC that any model can reach on its test split."""
    log, data = folder / "train.txt", folder / "data"
    best = synth(SynthOptions(rows=size.rows, output=log, seed=1, scale=size.scale))["last_tenth"]
    preprocess(PreprocessOptions(inputs=(log,), output=data, min_count=size.min_count))
    log.unlink()
    kept = sum(column.num_embeddings for column in read_manifest(data).categorical_columns)
    return data, {"best_ne": float(best["best_ne"] or 0), "best_auc": float(best["best_auc"] or 0), "kept_ids": float(kept)}


def train(output: Path, data: Path, size: Size, compression: int, form: Form, lr: float, seed: int) -> dict[str, float]:
    """Train; return val_ne; ne, auc and logloss of the test split; params, bytes, dense_bytes, step_ms and peak_mib."""
    settings = {
        "output": output, "seed": seed, "training.steps": size.steps, "data.path": data, "data.batch_size": size.batch,
        form.key: lr, "ranks.early_steps": size.early, "ranks.late_steps": size.late, "ranks.target_compression": compression,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()] + list(form.overrides)
    comera("train", "--config", CONFIG, *overrides)
    result: dict[str, Any] = json.loads((output / "result.json").read_text())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("ne", "auc", "logloss", "params", "bytes", "dense_bytes", "step_ms", "first_step_ms", "peak_mib")
    val_ne = next(line["ne"] for line in reversed(lines) if line["kind"] == "eval" and line["split"] == "val")
    return {name: result[name] for name in names} | {"val_ne": val_ne}
