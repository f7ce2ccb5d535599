"""A whole DLRM on synthetic Criteo logs of Kaggle's cardinalities: dense, and 99 to 1,000 times smaller, MLPs included.

Also every architecture on the demo's logs, dense and with tables 50 times smaller, with fixed ranks.

Every run is `comera train --config examples/kaggle.toml` in its own process. Each form tries the learning rates of its tables with
seed 0 at each compression; the other seeds use the rate with the best NE on the validation split. Each run yields one row: NE on
the test split; `counted` has the best NE and AUC that any model can reach there, ms per step and peak MiB.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.environment import FOLDER, describe
from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.quality.runs import SEEDS, best_rate, format_case
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

__all__ = ["format_case", "run"]

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
    seeds: int
    forms: tuple[str, ...] = ("dense", "TT adaptive", "TT + rows adaptive")


FORMS = {
    "dense": Form(
        overrides=("tables.format=dense", "linears.format=dense", "ranks=none"),
        key="optimizer.lr_tables",
        rates=(0.0125, 0.025, 0.05, 0.1),
    ),
    "TT adaptive": Form(overrides=("tables.hot_rows=0",), key="optimizer.lr_cores", rates=(0.0015, 0.003, 0.006, 0.01)),
    "TT + rows adaptive": Form(overrides=("tables.hot_rows=auto",), key="optimizer.lr_cores", rates=(0.0008, 0.0015, 0.003, 0.006)),
}
ARCHITECTURES = {
    "DLRM": (),
    "DCN": ("model.architecture=dcn",),
    "DeepFM": ("model.architecture=deepfm", "model.dense_arch=[256]", "model.over_arch=[256]"),
    "Wide & Deep": ("model.architecture=wide_deep",),
}
FIXED = replace(FORMS["TT + rows adaptive"], overrides=("tables.hot_rows=auto", "tables.compression=50", "ranks=none"))
OF_ARCHITECTURES = {  # on half a million rows lower rates are best
    f"{architecture} {name}": replace(form, overrides=form.overrides + overrides, rates=rates)
    for architecture, overrides in ARCHITECTURES.items()
    for name, form, rates in (("dense", FORMS["dense"], (0.0015, 0.003, 0.006)), ("TT + rows", FIXED, (0.0015, 0.003, 0.006)))
}
SIZES = (
    Size(
        data="synth", rows=1_000_000, scale=1.0, min_count=2, batch=2048, steps=390, early=80, late=120, compressions=(99,),
        seeds=SEEDS,
    ),
    Size(
        data="synth-10M", rows=10_000_000, scale=1.0, min_count=1, batch=2048, steps=1000, early=200, late=300,
        compressions=(99, 500, 1000), seeds=SEEDS, forms=("dense", "TT + rows adaptive"),
    ),
    Size(
        data="demo", rows=500_000, scale=1.0, min_count=1, batch=1024, steps=430, early=80, late=160, compressions=(50,),
        seeds=SEEDS, forms=tuple(OF_ARCHITECTURES),
    ),
)  # fmt: skip
QUICK = tuple(
    replace(size, rows=20_000, scale=0.02, batch=128, steps=40, early=10, late=20, compressions=(20,), seeds=1) for size in SIZES
)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the runs not in `settings.finished`, one row each."""
    rows, environment = list(settings.finished), describe(settings.device)
    for size in QUICK if settings.quick else SIZES:
        if settings.only.get("data", size.data) != size.data:
            continue
        plan = _plan(size, settings)
        with tempfile.TemporaryDirectory(dir=settings.data) as folder:
            data: Path | None = None
            reachable: dict[str, float] = {}
            for name, compression, rate, seed in tqdm(plan, desc=f"dlrm, {size.data}", unit="run", disable=None):
                shapes = {"data": size.data, "method": name, "compression": compression, "steps": size.steps}
                shapes["lr"] = rate or best_rate(rows, shapes)
                if any(row.shapes == shapes and row.seed == seed for row in rows):
                    continue
                if data is None:
                    data, reachable = prepare(Path(folder), size)
                form = (FORMS | OF_ARCHITECTURES)[name]
                measured = train(Path(folder, f"run-{len(rows)}"), data, size, compression, form, shapes["lr"], seed)
                ne = measured.pop("ne")
                rows.append(
                    Row(
                        op="dlrm", provider=name, shapes=shapes, dtype="float32", pass_="test",
                        p20=ne, p50=ne, p80=ne, unit="NE", samples=1, ratios={},
                        counted=measured | reachable, **environment, seed=seed,
                        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    )
                )  # fmt: skip
                yield rows[-1:]


def _plan(size: Size, settings: Settings) -> list[tuple[str, int, float | None, int]]:
    """Form, compression, rate and seed of each run; rate None is the best one so far. `only` may name methods, separated by `|`."""
    selected = settings.only.get("method", "|".join(size.forms)).split("|")
    forms = {name: form for name, form in (FORMS | OF_ARCHITECTURES).items() if name in size.forms and name in selected}
    cases = [  # a dense form has one size
        (name, compression)
        for compression in size.compressions
        for name in forms
        if settings.only.get("compression", str(compression)) == str(compression)
        and (compression == size.compressions[0] or not name.endswith("dense"))
    ]
    tried = None if size.seeds > 1 else 1
    plan: list[tuple[str, int, float | None, int]]
    plan = [(*case, rate, settings.seed) for case in cases for rate in forms[case[0]].rates[:tried]]
    return plan + [(*case, None, settings.seed + k) for k in range(1, size.seeds) for case in cases]


def prepare(folder: Path, size: Size) -> tuple[Path, dict[str, float]]:
    """Prepare the data set; return it with the best NE and AUC that any model can reach on its test split."""
    log, data = folder / "train.txt", folder / "data"
    best = synth(SynthOptions(rows=size.rows, output=log, seed=1, scale=size.scale)).last_tenth
    assert best is not None  # enough rows
    preprocess(PreprocessOptions(inputs=(log,), output=data, min_count=size.min_count))
    log.unlink()
    kept = sum(column.num_embeddings for column in read_manifest(data).categorical_columns)
    return data, {"best_ne": float(best.best_ne or 0), "best_auc": float(best.best_auc or 0), "kept_ids": float(kept)}


def train(output: Path, data: Path, size: Size, compression: int, form: Form, lr: float, seed: int) -> dict[str, float]:
    """Train; return val_ne; ne, auc and logloss of the test split; params, bytes, dense_bytes, step_ms and peak_mib."""
    settings = {
        "output": output, "seed": seed, "training.steps": size.steps, "data.path": data, "data.batch_size": size.batch,
        form.key: lr, "ranks.early_steps": size.early, "ranks.late_steps": size.late, "ranks.target_compression": compression,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()] + list(form.overrides)
    subprocess.run(
        [sys.executable, "-m", "comera_rec.train", "--config", str(CONFIG), *overrides],
        cwd=FOLDER.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads((output / "result.json").read_text())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("ne", "auc", "logloss", "params", "bytes", "dense_bytes", "step_ms", "first_step_ms", "peak_mib")
    val_ne = next(line["ne"] for line in reversed(lines) if line["kind"] == "eval" and line["split"] == "val")
    return {name: result[name] for name in names} | {"val_ne": val_ne}
