"""Where the time of a training step goes: Criteo-Kaggle's DLRM, dense and TT in turns, and MLPerf's DLRM-DCNv2, TT alone.

Models, optimizers and precision are those of `comera train` with a config of `examples/`. Ids are drawn as they are needed. Each
case has its own new process, so that the peak memory of a model that is alone in it is that of training: libraries, weights,
optimizer state and activations.

Shapes: B samples, F = 26 features, N columns.
"""

import copy
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.environment import FOLDER
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.memory import resident_peak_mib
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from benchmarks.lookup.rivals import rows_of
from benchmarks.lookup.tables import KAGGLE, ZIPF
from comera_rec.convert import compression_report
from comera_rec.nn import named_tt_modules, update_in_backward_
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.training.config import RunConfig, load_config
from comera_rec.training.memory import keep_freed_memory, return_freed_memory
from comera_rec.training.model import Schema
from comera_rec.training.placement import place
from comera_rec.training.state import TrainingState

EXAMPLES = FOLDER.parent / "examples"
DENSE = tuple(f"I{k}" for k in range(1, 14))
# Rows of each table and ids of each of its bags (github.com/mlcommons/training, recommendation_v2/torchrec_dlrm: values of
# --num_embeddings_per_feature and --multi_hot_sizes).
MLPERF = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976,
    14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

# The parts of a step in order, without drawing the batch.
PARTS = (
    "bottom MLP", "tables", "interaction", "top MLP and loss", "top MLP, backward", "interaction, backward",
    "tables, backward and update", "bottom MLP, backward", "update of the rest",
)  # fmt: skip
STEP, PROCESS = "whole step", "whole process"
_CHECKED = 64  # samples whose bags are compared with the definition


def draw_power_law(rows: int, count: int, exponent: float) -> Tensor:
    """Draw ids [count] of one table, much as by Zipf's law, in memory that doesn't depend on the number of rows.

    Inverts the integral of a density proportional to x^-exponent on [1, rows + 1), and truncates; the exponent must not be 1.
    """
    last = (rows + 1.0) ** (1 - exponent)
    numbers = (1 + torch.rand(count, dtype=torch.float64) * (last - 1)).pow_(1 / (1 - exponent))
    return numbers.long().sub_(1).clamp_(0, rows - 1)


@dataclass(frozen=True, kw_only=True)
class StepCase(Sizes):
    """A model with all of its rows, or with fewer."""

    model: str
    batch: int
    precision: str = "float32"
    scale: float = 1.0
    steps: int

    @property
    def rows(self) -> dict[str, int]:
        """Column -> rows of its table."""
        counts = KAGGLE if self.model == "kaggle" else MLPERF
        return {f"C{k}": max(2, math.ceil(self.scale * count)) for k, count in enumerate(counts, start=1)}

    @property
    def bags(self) -> Sequence[int]:
        """Ids of a sample in each column."""
        return (1,) * len(KAGGLE) if self.model == "kaggle" else BAGS

    @property
    def forms(self) -> dict[str, RunConfig]:
        """The forms of the model, which take steps in turns."""
        small = [] if self.scale == 1 else ["tables.compression=10", "tables.min_rows=100", "model.cross_rank=16"]
        path, overrides = EXAMPLES / CONFIGS[self.model], [f"training.precision={self.precision}", f"data.batch_size={self.batch}"]
        forms = {"TT": load_config(path, overrides + small)}
        if self.model == "kaggle":
            forms["dense"] = load_config(path, [*overrides, "tables.format=dense", "linears.format=dense", "ranks=none"])
        return forms

    def shapes(self) -> dict[str, Any]:
        config = self.forms["TT"]
        sizes = {"rows": sum(self.rows.values()), "dim": config.model.embedding_dim, "batch": self.batch}
        sizes["ids a sample"] = sum(self.bags)
        return {"model": self.model, **sizes, "compression": config.tables.compression, "products": self.precision}

    def batch_of(self, seed: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        """Draw dense features, ids by a power law, and labels that depend on the dense features."""
        torch.manual_seed(seed)
        ids = [draw_power_law(count, self.batch * bag, ZIPF) for count, bag in zip(self.rows.values(), self.bags, strict=True)]
        lengths = torch.tensor(self.bags).repeat_interleave(self.batch)
        dense = torch.randn(self.batch, len(DENSE))
        return dense, KeyedJaggedTensor(list(self.rows), torch.cat(ids), lengths=lengths), (dense[:, 0] > 0).float()


CONFIGS = {"kaggle": "kaggle.toml", "mlperf": "mlperf_dcnv2.toml"}
CASES = (
    StepCase(model="kaggle", batch=2048, steps=60),
    StepCase(model="kaggle", batch=16_384, steps=12),
    StepCase(model="mlperf", batch=8192, precision="bfloat16", steps=7),
    StepCase(model="mlperf", batch=8192, steps=7),
)
QUICK = tuple(replace(case, batch=128, scale=1e-3, steps=2) for case in CASES[1:3])


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield rows of each form: one for each part, one for the whole step, and for a single form the process's peak memory."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as when running the MLPerf example; torch reads it in each new process
    for case, rows in each_case("step", QUICK if settings.quick else CASES, settings):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            forms, peak_mib = process.submit(train, case, settings.seed, torch.get_num_threads()).result()
        counted, shapes = {form: counts for form, (_, counts) in forms.items()}, case.shapes()
        for part in (*PARTS, STEP):
            samples = {form: times[part] for form, (times, _) in forms.items()}
            yield rows("step", "ms", samples, counted, ("dense",), shapes={**shapes, "part": part})
        if len(forms) == 1:
            yield rows("run", "MiB", {form: [peak_mib] for form in forms}, counted, shapes={**shapes, "part": PROCESS})


Times = dict[str, list[float]]


def train(case: StepCase, seed: int, threads: int) -> tuple[dict[str, tuple[Times, dict[str, float]]], float]:
    """Return, for each form, milliseconds of each part and of the step, and sizes and losses; and the process's peak memory.

    Raises:
        Disagreement: if bags differ from the definition, or a loss is not finite.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    steps = {}
    for form, config in case.forms.items():
        torch.manual_seed(seed)
        steps[form] = Step(place(config, Schema(dense=DENSE, sparse=case.rows), None, torch.device("cpu"), case.batch), case)
        steps[form].verify(seed)
    return_freed_memory()
    for turn in range(case.steps + 1):
        for step in steps.values():
            step(*case.batch_of(seed + turn))
    for form, step in steps.items():
        if not all(map(math.isfinite, step.losses)):
            raise Disagreement(f"step, {case.shapes()}: the loss of {form} is {step.losses[-1]}")
    return {form: (step.times(), step.counted()) for form, step in steps.items()}, resident_peak_mib()


class Step:
    """A training step whose parts are timed by hooks, so that `model(...)` and `backward()` run unchanged."""

    def __init__(self, state: TrainingState, case: StepCase) -> None:
        self._state, self._case = state, case
        [self._collection] = [module for module in state.module.modules() if isinstance(module, TTEmbeddingBagCollection)]
        if any(True for _ in named_tt_modules(self._collection)):
            update_in_backward_(state.module, state.optimizer)
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bfloat16")
        self._ticks: list[dict[str, float]] = []  # of each step: when its parts ended
        self.losses: list[float] = []
        for module, forward, backward in (
            ("dense_arch", "bottom MLP", "tables, backward and update"),
            ("sparse_arch", "tables", "interaction, backward"),
            ("inter_arch", "interaction", "top MLP, backward"),
        ):
            state.module.get_submodule(module).register_forward_hook(partial(self._after, forward, backward))

    def __call__(self, dense: Tensor, features: KeyedJaggedTensor, labels: Tensor) -> None:
        """Take a step."""
        self._ticks.append({})
        self._tick("")
        with self._autocast:
            logits = self._state.model(dense, features)
        loss = F.binary_cross_entropy_with_logits(logits.float().squeeze(1), labels)
        self._tick("top MLP and loss")
        loss.backward()
        self._tick("bottom MLP, backward")
        self._state.optimizer.step()
        self._state.optimizer.zero_grad()
        self._tick("update of the rest")
        assert tuple(self._ticks[-1])[1:] == PARTS
        self.losses.append(float(loss.detach()))

    def verify(self, seed: int) -> None:
        """Raise a Disagreement unless the first samples' bags are sums of rows that are formed one by one in float64."""
        few = replace(self._case, batch=_CHECKED)
        _, features, _ = few.batch_of(seed)
        expected, weights = [], self._collection.state_dict()
        for name, bag in zip(few.rows, few.bags, strict=True):
            ids = features[name].values()
            if name in self._collection.tt_bags:
                rows = rows_of(copy.deepcopy(self._collection.tt_bag(name)).double(), ids).detach()
            else:
                rows = weights[f"dense_bags.embedding_bags.{name}.weight"][ids].double()
            expected.append(rows.view(_CHECKED, bag, -1).sum(1))
        with torch.no_grad():
            bags = self._collection(features).values()
        require_agreement({"output": torch.cat(expected, dim=1)}, {"TTEmbeddingBagCollection": {"output": bags}})

    def times(self) -> Times:
        """Return milliseconds of each part and of the whole in every step but the first, in which optimizers create their state."""
        ends = [list(ticks.values()) for ticks in self._ticks[1:]]
        steps = [[1e3 * (last - first) for first, last in (*pairwise(each), (each[0], each[-1]))] for each in ends]
        return dict(zip((*PARTS, STEP), map(list, zip(*steps, strict=True)), strict=True))

    def counted(self) -> dict[str, float]:
        """Return sizes, and the loss of the last step."""
        report = compression_report(self._state.module)
        sizes = {"table_mib": report.total("bytes", kind="table") / 2**20, "dense_gb": report.total("dense_bytes") / 1e9}
        return {"params": report.total("params"), **sizes, "last_loss": self.losses[-1]}

    def _tick(self, part: str, *_: object) -> None:
        self._ticks[-1][part] = time.perf_counter()

    def _after(self, forward: str, backward: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._tick(forward)
        output.register_hook(partial(self._tick, backward))
