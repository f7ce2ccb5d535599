"""MLPerf's DLRM-DCNv2 at its original sizes, tables 1,000 times smaller: the parts of a training step, and its peak memory.

Model, optimizers and precision are those of `comera train --config examples/mlperf_dcnv2.toml`. Ids are drawn as they are needed.
Each case has its own new process, so that its peak is that of training: libraries, weights, optimizer state and activations.

Shapes: B samples, F = 26 features, N = 128 columns.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.environment import FOLDER
from benchmarks.harness.ids import draw_power_law
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.memory import resident_peak_mib
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from benchmarks.lookup.rivals import rows_of
from benchmarks.lookup.tables import ZIPF
from comera_rec.convert import compression_report
from comera_rec.nn import update_in_backward_
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.training.config import RunConfig, load_config
from comera_rec.training.memory import keep_freed_memory, return_freed_memory
from comera_rec.training.model import Schema, build_model, build_optimizer, fuse_dense_tables_

CONFIG = FOLDER.parent / "examples" / "mlperf_dcnv2.toml"
DENSE = tuple(f"I{k}" for k in range(1, 14))
# Rows of each table and ids of each of its bags (github.com/mlcommons/training, recommendation_v2/torchrec_dlrm: values of
# --num_embeddings_per_feature and --multi_hot_sizes).
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976,
    14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

# The parts of a step in order, without drawing the batch.
PARTS = ("plan", "lookup", "MLPs and cross network", "their backward", "lookup's backward and update", "update of the rest")
STEP, PROCESS = "whole step", "whole process"
_CHECKED = 64  # samples whose bags are compared with the definition


@dataclass(frozen=True, kw_only=True)
class MLPerfCase(Sizes):
    """The model with all of its rows, or with fewer."""

    precision: str
    batch: int = 8192
    scale: float = 1.0
    steps: int = 7

    @property
    def rows(self) -> dict[str, int]:
        """Column -> rows of its table."""
        return {f"C{k}": max(2, math.ceil(self.scale * count)) for k, count in enumerate(ROWS, start=1)}

    def config(self) -> RunConfig:
        """The example's config."""
        small = [] if self.scale == 1 else ["tables.compression=10", "tables.min_rows=100", "model.cross_rank=16"]
        return load_config(CONFIG, [f"training.precision={self.precision}", f"data.batch_size={self.batch}", *small])

    def shapes(self) -> dict[str, Any]:
        compression = self.config().tables.compression
        sizes = {"rows": sum(self.rows.values()), "dim": self.config().model.embedding_dim, "batch": self.batch}
        return {**sizes, "ids a sample": sum(BAGS), "compression": compression, "products": self.precision}

    def batch_of(self, seed: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        """Draw dense features, ids by a power law, and labels that depend on the dense features."""
        torch.manual_seed(seed)
        ids = [draw_power_law(count, self.batch * bag, ZIPF) for count, bag in zip(self.rows.values(), BAGS, strict=True)]
        lengths = torch.tensor(BAGS).repeat_interleave(self.batch)
        dense = torch.randn(self.batch, len(DENSE))
        return dense, KeyedJaggedTensor(list(self.rows), torch.cat(ids), lengths=lengths), (dense[:, 0] > 0).float()


def cases(quick: bool) -> list[MLPerfCase]:
    """Matrix products in both types; if quick, a thousandth of the rows."""
    full = [MLPerfCase(precision=precision) for precision in ("bfloat16", "float32")]
    return [replace(full[0], batch=128, scale=1e-3, steps=2)] if quick else full


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each part, one for the whole step, and one for the process's peak memory."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as when running the example; torch reads it in each new process
    for case, rows in each_case("mlperf", cases(settings.quick), settings):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            samples, counted = process.submit(train, case, settings.seed, torch.get_num_threads()).result()
        times = rows("step", "ms", samples, dict.fromkeys(samples, counted))
        yield times + rows("run", "MiB", {PROCESS: [counted["peak_mib"]]}, {PROCESS: counted})


def train(case: MLPerfCase, seed: int, threads: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return milliseconds of each part and of the step, after a first step; and sizes, losses and peak memory.

    Raises:
        Disagreement: if bags differ from the definition, or the loss is not finite.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    config = case.config()
    model = build_model(config, Schema(dense=DENSE, sparse=case.rows))
    report = compression_report(model)
    [collection] = [module for module in model.modules() if isinstance(module, TTEmbeddingBagCollection)]
    verify(collection, case, seed)
    fuse_dense_tables_(model, config.optimizer.lr_tables, torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    update_in_backward_(model, optimizer)
    return_freed_memory()
    step = Step(model, collection, optimizer, case.precision)
    samples: dict[str, list[float]] = {name: [] for name in (*PARTS, STEP)}
    losses = []
    for turn in range(case.steps + 1):
        parts, loss = step(*case.batch_of(seed + turn))
        losses.append(loss)
        if turn:  # in the first step optimizers create their state
            for name, ms in zip((*PARTS, STEP), (*parts, sum(parts)), strict=True):
                samples[name].append(ms)
    if not all(map(math.isfinite, losses)):
        raise Disagreement(f"mlperf, {case.shapes()}: the loss is {losses[-1]}")
    counted = {
        "params": report.total("params"), "table_mib": report.total("bytes", kind="table") / 2**20,
        "dense_gb": report.total("dense_bytes") / 1e9, "first_loss": losses[0], "last_loss": losses[-1],
        "peak_mib": resident_peak_mib(),
    }  # fmt: skip
    return samples, {name: float(value) for name, value in counted.items()}


def verify(collection: TTEmbeddingBagCollection, case: MLPerfCase, seed: int) -> None:
    """Raise a Disagreement unless the first samples' bags are sums of rows that are contracted one by one in float64."""
    few = replace(case, batch=_CHECKED)
    _, features, _ = few.batch_of(seed)
    expected = []
    for (name, table), bag in zip(collection.embedding_bags.items(), BAGS, strict=True):
        ids = features[name].values()
        if name in collection.tt_bags:
            rows = rows_of(copy.deepcopy(collection.tt_bag(name)).double(), ids).detach()
        else:
            rows = table.get_parameter("weight").detach().double()[ids]
        expected.append(rows.view(_CHECKED, bag, -1).sum(1))
    with torch.no_grad():
        bags = collection(features).values()
    require_agreement({"output": torch.cat(expected, dim=1)}, {"TTEmbeddingBagCollection": {"output": bags}})


class Step:
    """A training step whose parts are timed by hooks, so that `model(...)` and `backward()` run unchanged."""

    def __init__(
        self, model: nn.Module, collection: TTEmbeddingBagCollection, optimizer: torch.optim.Optimizer, precision: str
    ) -> None:
        self._model, self._collection, self._optimizer = model, collection, optimizer
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
        self._times: list[float] = []
        collection.register_forward_hook(self._after_lookup)

    def __call__(self, dense: Tensor, features: KeyedJaggedTensor, labels: Tensor) -> tuple[list[float], float]:
        """Take a step; return the milliseconds of `PARTS`, and the loss."""
        self._times = []
        self._tick()
        self._collection.plan_ahead(features)
        self._tick()
        with self._autocast:
            logits = self._model(dense, features)
        loss = F.binary_cross_entropy_with_logits(logits.float().squeeze(1), labels)
        self._tick()
        loss.backward()
        self._tick()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._tick()
        return [1e3 * (last - first) for first, last in zip(self._times, self._times[1:], strict=False)], float(loss.detach())

    def _tick(self, *_: object) -> None:
        self._times.append(time.perf_counter())

    def _after_lookup(self, module: nn.Module, inputs: tuple[Any, ...], output: KeyedTensor) -> None:
        self._tick()
        if output.values().requires_grad:
            output.values().register_hook(self._tick)
