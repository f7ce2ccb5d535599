"""Steps of the trainer, pipelined and plain, and of a typical hand-written TorchRec loop, on two processes and the same batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.environment import available_cores
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan, alternate
from comera_rec.testing import run as run_processes
from comera_rec.training.config import parse_config
from comera_rec.training.trainer import Trainer
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.synth import SynthOptions, synth

TORCHREC = "TorchRec's pipeline by hand"
PROVIDERS = ("trainer, pipelined", "trainer, plain", TORCHREC)
_AGREED = 5  # steps whose losses must agree before any step is timed


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """A DLRM with 26 tables, on synthetic rows."""

    format: str
    """Form of tables and layers: "dense" or "tt"."""
    batch: int = 4096
    """Rows of both processes together."""
    rows: int = 200_000
    world_size: int = 2
    dtype: str = "float32"

    def shapes(self) -> dict[str, Any]:
        return {"format": self.format, "processes": self.world_size, "cores": available_cores(), "batch": self.batch}


def cases(quick: bool) -> list[LoopCase]:
    """Dense tables and TT tables."""
    batch, rows = (256, 10_000) if quick else (LoopCase.batch, LoopCase.rows)
    return [LoopCase(format=form, batch=batch, rows=rows) for form in ("dense", "tt")]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of each case: the slower process's step, including reading its batch."""
    for case, rows in each_case("trainer-loop", cases(settings.quick), settings, threads=1):
        with tempfile.TemporaryDirectory() as folder:
            log, data = Path(folder, "log.txt"), Path(folder, "data")
            synth(SynthOptions(rows=case.rows, output=log, seed=settings.seed))
            preprocess(PreprocessOptions(inputs=(log,), output=data, val_fraction=0, test_fraction=0))
            rounds = 3 if settings.quick else 40
            results = run_processes(case.world_size, measure, case, str(data), settings.seed, rounds)
        samples = {name: [max(turn) for turn in zip(*(ms[name] for ms in results), strict=True)] for name in PROVIDERS}
        yield rows("step", "ms", samples, {}, [TORCHREC])


def measure(rank: int, case: LoopCase, data: str, seed: int, rounds: int) -> dict[str, list[float]]:
    """In each process, compare losses of the first steps, then time steps in turns, in ms."""
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    for name in PROVIDERS:
        trainer = _trainer(case, data, seed, pipeline=name == PROVIDERS[0])
        steps[name] = _hand_written_step(trainer) if name == TORCHREC else _trainer_step(trainer)
    losses = {name: {"output": torch.stack([step() for _ in range(_AGREED)])} for name, step in steps.items()}
    require_agreement(losses.pop(TORCHREC), losses)
    plan = Plan(warmup=2, min_rounds=rounds, max_rounds=rounds)
    return alternate({name: partial(_timed, step) for name, step in steps.items()}, plan, synchronize=dist.barrier)


def _timed(step: Callable[[], torch.Tensor], turn: int) -> None:
    step()


def _trainer(case: LoopCase, data: str, seed: int, *, pipeline: bool) -> Trainer:
    plain: dict[str, Any] = {
        "output": "unused", "seed": seed, "data": {"path": data, "batch_size": case.batch},
        "tables": {"format": case.format}, "linears": {"format": case.format}, "optimizer": {"name": "adagrad"},
        "training": {"steps": 10_000, "device": "cpu", "pipeline": pipeline},
    }  # fmt: skip
    if case.format == "tt":
        plain["tables"] |= {"tt_ranks": 8, "min_rows": 200}
    return Trainer(parse_config(plain))


def _trainer_step(trainer: Trainer) -> Callable[[], torch.Tensor]:
    batches = iter(trainer.loader)
    return lambda: trainer._step(batches)


def _hand_written_step(trainer: Trainer) -> Callable[[], torch.Tensor]:
    """The loop of TorchRec's tutorials, on the model, optimizer and batches of a trainer that does nothing else."""
    model, batches = trainer.model, iter(trainer.loader)

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse).squeeze(1), batch.labels)
        return loss, loss.detach()

    pipeline: Any = TrainPipelineSparseDist(model, trainer.optimizer, trainer.device, custom_model_fwd=forward)
    return lambda: pipeline.progress(batches)
