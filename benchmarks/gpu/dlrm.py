"""Steps of a whole DLRM on synthetic Criteo logs: dense, TT, and TT with steps in a CUDA graph, each in its own process.

Times are the trainer's medians. Nothing is tuned: the benchmark `dlrm` measures quality.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings, case_rows
from benchmarks.harness.rows import Row
from benchmarks.training import dlrm

DENSE, TT, GRAPH = "dense", "TT", "TT, CUDA graph"


@dataclass(frozen=True, kw_only=True)
class GpuDlrmCase:
    """Sizes of the log and of a run."""

    size: dlrm.Size
    dtype: str = "float32"

    def shapes(self) -> dict[str, Any]:
        compression = self.size.compressions[0]
        return {"rows": self.size.rows, "batch": self.size.batch, "steps": self.size.steps, "compression": compression}


FULL = replace(dlrm.SIZES[0], rows=400_000, batch=16_384, steps=120, early=20, late=20)

QUICK = dlrm.QUICK[1]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each form."""
    case = GpuDlrmCase(size=QUICK if settings.quick else FULL)
    compression = case.size.compressions[0]
    on_gpu = settings.device.startswith("cuda")
    forms = {DENSE: dlrm.FORMS["dense"], TT: dlrm.FORMS["TT + rows adaptive"]}
    if on_gpu:
        forms[GRAPH] = forms[TT]
    by_form: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=settings.data) as folder:
        data, _ = dlrm.prepare(Path(folder), case.size)
        for name, form in tqdm(forms.items(), desc="gpu-dlrm", unit="run", disable=None):
            where = (f"training.device={settings.device}", f"training.capture={str(name == GRAPH).lower()}")
            form = replace(form, overrides=form.overrides + where)
            rate = form.rates[len(form.rates) // 2]
            by_form[name] = dlrm.train(Path(folder, name), data, case.size, compression, form, rate, settings.seed)
    times = {name: [of.pop("step_ms")] for name, of in by_form.items()}
    yield case_rows("gpu-dlrm", case, settings, describe(settings.device), "step", "ms", times, by_form, (DENSE, TT))
