"""The training loop: batches in, a run's folder out, resumable at any step.

RUN/config.json, metrics.jsonl, tensorboard/, checkpoints/step_*.pt, and at the end result.json.
"""

from __future__ import annotations

import json
import math
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer
from tqdm import tqdm

from comera_rec.convert import compression_report
from comera_rec.nn import TTTable, named_tt_modules, update_in_backward_, use_float8_
from comera_rec.rank import RankScheduler
from comera_rec.rank.trains import bytes_outside_trains, gather_trains, max_over_processes, on_several_processes, total_params
from comera_rec.recsys import TTEmbeddingBagCollection
from comera_rec.recsys.sharding import rewrap_data_parallel_
from comera_rec.training.batches import Batch, BatchLoader, ParquetBatches
from comera_rec.training.captured_step import CapturedStep
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint, save_checkpoint
from comera_rec.training.config import RunConfig, parse_config, recorded_config
from comera_rec.training.memory import PeakMemory
from comera_rec.training.metrics import BinaryMetrics
from comera_rec.training.model import Schema, build_model, build_optimizer, fuse_dense_tables_, materialize_
from comera_rec.training.processes import Processes, available_cores, on_first
from comera_rec.training.rates import LearningRates
from comera_rec.training.state import TrainingState, load_model_
from data_pipeline.manifest import read_manifest

CHECKPOINTS = "checkpoints"
RESUMABLE_CHANGES = ("training", "output")  # may differ between a run and its continuation


class Interrupted(Exception):
    """Training was asked to stop (SIGTERM, SIGINT) and left a checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name} at step {step} with a checkpoint; run the same command to go on"
        )
        self.exit_status = 128 + signal_number


class Diverged(Exception):
    """The loss is no longer finite."""

    exit_status = 1


class Trainer:
    """One run, from the config to result.json.

    Where a launcher has started several processes, each builds one of these and calls the same methods: tables are sharded by plan,
    the rest is replicated, each process reads its own rows, and the first one writes. The folder must be the same for all.

    Args:
        config: the run; a folder that already holds a part of it is continued from its last checkpoint.
        model: trained from here instead of from a new model; of the config's sizes, ranks apart. For one process.

    Raises:
        ValueError: for data that does not fit, a batch that can't be shared equally, a folder that holds another run, or float8
            where there are no layers or no products for it (`use_float8_`).
    """

    def __init__(self, config: RunConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self.folder = Path(config.output)
        self.checkpoints = self.folder / CHECKPOINTS
        self.processes = Processes(config.training.device)
        self.device = self.processes.device
        self.memory = PeakMemory(self.device)
        self.manifest = read_manifest(config.data.path)
        self.schema = Schema.of(self.manifest)
        if config.training.eval_every and not self._rows("val"):
            raise ValueError(
                f"training.eval_every is {config.training.eval_every} but {config.data.path} has no validation rows: "
                "preprocess with a larger --val-fraction, or set training.eval_every=0"
            )
        if config.data.batch_size % self.processes.world_size:
            raise ValueError(
                f"data.batch_size is {config.data.batch_size}, which {self.processes.world_size} processes can't share equally: "
                "give a multiple"
            )
        self.loader = BatchLoader(
            self._batches("train", shuffle=True), prefetch=config.data.prefetch, pin_memory=self.device.type == "cuda"
        )
        self.total_steps = config.training.steps or max(1, round(config.training.epochs * self.loader.batches.batches_per_epoch()))
        torch.manual_seed(config.seed)
        self.model, self.module, table_optimizers = self._place(model)
        if config.training.precision == "float8":
            use_float8_(self.module)
        self.optimizer = build_optimizer(self.module, config.optimizer)
        if self._updates_in_backward():
            update_in_backward_(self.module, self.optimizer)
        # Where torch's threads take all cores, another one that works beside them costs more than it saves.
        if self.device.type == "cpu" and not self.processes.several and torch.get_num_threads() < available_cores():
            self.loader.prepare = self._plan_ahead
        self.scheduler = None
        if config.ranks:
            other_bytes = bytes_outside_trains(self._whole_model()) if self.processes.several else None
            self.scheduler = RankScheduler(self.module, self.optimizer, config.ranks, other_bytes=other_bytes)
        self.state = TrainingState(self.module, self.optimizer, table_optimizers)
        self.rates = LearningRates(
            self.optimizer, table_optimizers, total_steps=self.total_steps, warmup_steps=config.optimizer.warmup_steps,
            decay=config.optimizer.decay, as_tensors=config.training.capture and self.device.type == "cuda",
        )  # fmt: skip
        self.captured_step = CapturedStep(self._loss, self.optimizer, self.scheduler, capture=config.training.capture)
        self.steps = 0
        self.history_written = 0
        self.step_ms: list[float] = []
        self.first_step_ms = float("nan")

    def _updates_in_backward(self) -> bool:
        """Whether cores of tables are updated slice by slice: on CPU, and where the loss has no penalty on them."""
        has_tables = any(isinstance(module, TTTable) for module in self.module.modules())
        return has_tables and self.device.type == "cpu" and not (self.config.ranks and self.config.ranks.beta)

    def _plan_ahead(self, batch: Batch) -> None:
        for module in self.module.modules():
            if isinstance(module, TTEmbeddingBagCollection):
                module.plan_ahead(batch.sparse)

    def _place(self, model: nn.Module | None) -> tuple[nn.Module, nn.Module, list[KeyedOptimizer]]:
        """The model to call, the same without wrappers, and the optimizers of its dense tables."""
        config, lr = self.config, self.config.optimizer.lr_tables
        if not self.processes.several:
            model = (build_model(config, self.schema) if model is None else model).to(self.device)
            tables = fuse_dense_tables_(model, lr, self.device)
            return model, model, tables
        if model is not None:
            raise ValueError("a model that is given is trained on one process: save it, and continue from its folder on several")
        # Dense tables that no process could hold are made where they will be.
        whole = materialize_(build_model(config, self.schema, device="meta"), self.device)
        sharded = self.processes.shard(whole, config.data.batch_size // self.processes.world_size, lr)
        return sharded, sharded.module, [sharded.fused_optimizer]

    def _whole_model(self) -> nn.Module:
        """The model as one process would hold it, at the present ranks, on the meta device."""
        whole, trains = build_model(self.config, self.schema, device="meta"), gather_trains(dict(named_tt_modules(self.module)))
        for name, module in named_tt_modules(whole):
            module.resize_ranks_(trains[name].shape.ranks)
        return whole

    def _batches(self, split: str, *, shuffle: bool) -> ParquetBatches:
        data, rank, world_size = self.config.data, self.processes.rank, self.processes.world_size
        if shuffle:
            return ParquetBatches(
                data.path, split, batch_size=data.batch_size // world_size, shuffle=True, shuffle_rows=data.shuffle_rows,
                seed=self.config.seed, epochs=None, drop_last=True, rank=rank, world_size=world_size,
            )  # fmt: skip
        return ParquetBatches(data.path, split, batch_size=data.eval_batch_size, rank=rank, world_size=world_size)

    # -- state ---------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, and the config beside it."""
        self._write_config()
        record = {
            "step": self.steps,
            "processes": self.processes.world_size,
            "config": self.config.to_dict(),
            "schema": self.schema.to_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "batches": self.loader.state_dict(),
        }
        keep = self.config.training.keep_checkpoints
        save_checkpoint(self.checkpoints, self.steps, record, self.state.tensors(), keep=keep)

    def _write_config(self) -> None:
        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_json(self.folder / "config.json", self.config.to_dict())

        on_first(write)

    def _resume(self) -> None:
        path = on_first(lambda: latest_checkpoint(self.checkpoints))
        if path is None:
            return
        checkpoint = open_checkpoint(path)
        record = checkpoint.record
        mine, theirs = self.config.to_dict(), recorded_config(record)
        differing = [key for key in mine if key not in RESUMABLE_CHANGES and mine[key] != theirs.get(key)]
        if differing:
            raise ValueError(
                f"{self.folder} holds another run: its config differs in {', '.join(differing)}; "
                "choose another output, or remove the folder to start anew"
            )
        if Schema.from_dict(record["schema"]) != self.schema:
            raise ValueError(f"{self.folder} was trained on other data than {self.config.data.path}: choose another output")
        before = record["processes"]
        if record["step"] and before != self.processes.world_size:
            raise ValueError(
                f"{self.folder} was trained on {before} process{'es' if before > 1 else ''}, and which batches are left depends on "
                "it: launch as many, or choose another output"
            )
        if record["step"]:  # the first checkpoint of a compressed dense run has seen no batch, nor any number of processes
            self.loader.load_state_dict(record["batches"])
        self.state.load(checkpoint)
        self._replicate_anew()
        if self.scheduler:
            self.scheduler.load_state_dict(record["scheduler"])
            self.history_written = len(self.scheduler.history)
        self.steps = record["step"]

    def _replicate_anew(self) -> None:
        """After ranks have changed."""
        if isinstance(self.model, DistributedModelParallel):
            rewrap_data_parallel_(self.model)

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end, evaluate on the test split, and write result.json.

        Raises:
            Interrupted: after SIGTERM or SIGINT, with a checkpoint written.
            Diverged: if the loss is not finite; the last good checkpoint stays.

        Returns:
            The contents of result.json.
        """
        result_path = self.folder / "result.json"
        self._resume()
        if self.processes.any(self.steps < self.total_steps or not result_path.exists()):
            self._write_config()
            self.log = MetricsLog(self.folder, self.steps) if self.processes.is_first else NoLog()
            try:
                with _deferred_signals() as received:
                    self._run(received)
                result = self._result()
                on_first(lambda: _write_json(result_path, result))
            finally:
                self.log.close()
        return on_first(lambda: dict(json.loads(result_path.read_text())))

    def _run(self, received: list[int]) -> None:
        training = self.config.training
        losses: list[Tensor] = []
        interval_start = time.perf_counter()
        self._log_ranks()
        hidden = None if self.processes.is_first else True
        bar = tqdm(total=self.total_steps, initial=self.steps, unit="step", desc=self.folder.name, disable=hidden)
        batches: Iterator[Batch] = iter(self.loader) if self.steps < self.total_steps else iter(())
        with bar:
            for batch in batches:
                losses.append(self._step(batch.to(self.device, non_blocking=True)))
                if math.isnan(self.first_step_ms):
                    losses[0].cpu()  # waits for the device
                    self.first_step_ms = 1e3 * (time.perf_counter() - interval_start)
                bar.update()
                last = self.steps >= self.total_steps
                # Several processes agree to stop where they wait for each other's losses anyway.
                stopping = bool(received)
                if self.processes.several:
                    stopping = _due(self.steps, training.log_every) and self.processes.any(stopping)
                saving = last or stopping or _due(self.steps, training.checkpoint_every)
                evaluating = not last and not stopping and _due(self.steps, training.eval_every)
                if _due(self.steps, training.log_every) or saving or evaluating:
                    loss = self._checked_mean(losses)
                    # Reading the losses has waited for the device, so this is the time of whole steps on a GPU too.
                    self.step_ms.append(1e3 * (time.perf_counter() - interval_start) / len(losses))
                    self.log.write(
                        "train",
                        self.steps,
                        loss=loss,
                        step_ms=self.step_ms[-1],
                        memory_mib=self.memory.take(),
                        rows=self.steps * self.config.data.batch_size,
                    )
                    bar.set_postfix(loss=f"{loss:.4f}")
                    losses = []
                self._log_ranks()
                if evaluating:  # before saving, so that a run that goes on from the checkpoint has this evaluation behind it
                    self._evaluate("val")
                if saving:
                    self.save()
                if stopping:
                    raise Interrupted(received[0] if received else signal.SIGTERM, self.steps)
                if not losses:
                    interval_start = time.perf_counter()
                if last:
                    break

    def _step(self, batch: Batch) -> Tensor:
        """One optimizer step; returns the task loss, which stays on the device."""
        changes = len(self.scheduler.history) if self.scheduler else 0
        self.rates.set(self.steps + 1)
        loss = self.captured_step(batch.dense, batch.sparse, batch.labels)
        if self.scheduler and len(self.scheduler.history) > changes:
            self._replicate_anew()
        self.steps += 1
        return loss

    def _loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of a batch: dense [B, I], labels [B]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.training.precision != "float32"):
            logits = self.model(dense, sparse).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits.float(), labels)

    def _checked_mean(self, losses: list[Tensor]) -> float:
        stacked = self.processes.mean(torch.stack(losses)).cpu()
        bad = (~stacked.isfinite()).nonzero().flatten()
        if bad.numel():
            step = self.steps - len(losses) + int(bad[0]) + 1
            kept = latest_checkpoint(self.checkpoints)
            raise Diverged(
                f"the loss is {float(stacked[bad[0]])} at step {step}: lower the learning rates; "
                + (f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet")
            )
        return float(stacked.mean())

    def _log_ranks(self) -> None:
        if self.scheduler:
            for entry in self.scheduler.history[self.history_written :]:
                self.log.write("ranks", **{k: v for k, v in entry.items() if k != "loss"})
            self.history_written = len(self.scheduler.history)
        elif self.steps == 0:
            trains = gather_trains(dict(named_tt_modules(self.module)))
            ranks = {name: list(train.shape.ranks) for name, train in trains.items()}
            if ranks:
                params = total_params(trains)
                self.log.write("ranks", 0, stage="fixed", objective=None, params=params, target_params=None, ranks=ranks)

    def _rows(self, split: str) -> int:
        return self.manifest.splits[split].rows

    def _evaluate(self, split: str) -> dict[str, Any]:
        metrics = evaluate(self.model, self._batches(split, shuffle=False), self.device)
        self.log.write("eval", self.steps, split=split, **metrics)
        return metrics

    def _result(self) -> dict[str, Any]:
        peak = self.processes.max(self.memory.highest)
        if self.scheduler and self.scheduler.stage != "done" and self.processes.is_first:
            tqdm.write(
                f"the run ended in the {self.scheduler.stage} stage of its ranks, off the target size: "
                "raise training.steps and go on, or lower ranks.early_steps and ranks.late_steps",
                file=sys.stderr,
            )
        if self._rows("val"):
            self._evaluate("val")
        split = next(name for name in ("test", "val", "train") if self._rows(name))
        metrics = self._evaluate(split)
        step_ms = statistics.median(self.step_ms or [float("nan")])
        return {
            "name": self.folder.name,
            "steps": self.steps,
            "split": split,
            **metrics,
            "step_ms": step_ms,
            "first_step_ms": self.first_step_ms,
            "rows_per_s": 1e3 * self.config.data.batch_size / step_ms,
            "peak_mib": peak,
            **compression_report(self._whole_model() if self.processes.several else self.model).to_dict(),
            "processes": self.processes.world_size,
            "seed": self.config.seed,
            "device": _device_name(self.device),
            "versions": {name: version(name) for name in ("comera-rec", "torch", "torchrec")}
            | {"python": platform.python_version()},
            "data_rows": self.manifest.rows.written,
        }


def evaluate(model: nn.Module, batches: ParquetBatches, device: torch.device) -> dict[str, Any]:
    """AUC, NE, logloss and rows of a model over all batches of a split; where there are several processes, over those of all."""
    metrics = BinaryMetrics()
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in BatchLoader(batches):
            batch = batch.to(device)
            rows = len(batch)
            if on_several_processes():  # shares differ by a row, and processes exchange bags of equal batches
                batch = batch.padded(int(max_over_processes(rows)))
            metrics.update(model(batch.dense, batch.sparse).squeeze(1)[:rows], batch.labels[:rows])
    model.train(training)
    return metrics.compute()


def load_run(folder: str | Path) -> tuple[nn.Module, RunConfig, Schema]:
    """The model of a run's last checkpoint, its config and the schema of its data.

    Raises:
        ValueError: if the folder holds no checkpoint.
    """
    checkpoint = latest_checkpoint(Path(folder) / CHECKPOINTS)
    if checkpoint is None:
        raise ValueError(f"{folder} holds no checkpoint: give a run's folder, as written by `comera train`")
    opened = open_checkpoint(checkpoint)
    config = parse_config(recorded_config(opened.record))
    schema = Schema.from_dict(opened.record["schema"])
    return load_model_(build_model(config, schema), opened).eval(), config, schema


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run; lines after the step it continues from are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if step and path.exists() else []
        path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else 0)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line, and the numbers among its values to TensorBoard."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        group = f"{kind}/{values['split']}" if kind == "eval" else kind
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{group}/{name}", value, step)
        for name, ranks in values.get("ranks", {}).items():
            self._board.add_scalar(f"rank/{name}", sum(ranks) / max(1, len(ranks)), step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()


class NoLog:
    """Of processes that don't write."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line cut off by a crash
        return float("inf")


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list, so that the loop can stop between two steps."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
