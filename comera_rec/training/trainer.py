"""The training loop: batches in, a run's folder out, resumable at any step.

RUN/config.json, metrics.jsonl, tensorboard/, checkpoints/step_*/, and at the end result.json.
"""

import contextlib
import errno
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.convert import compression_report
from comera_rec.data import Batch, BatchLoader, ParquetBatches
from comera_rec.distributed import WORLD, join_launched
from comera_rec.nn import TTTable, named_tt_modules, update_in_backward_
from comera_rec.rank import RankScheduler
from comera_rec.rank.tt_modules import bytes_outside
from comera_rec.training.checkpoint import checkpoint_at, latest_checkpoint, open_checkpoint, save_checkpoint
from comera_rec.training.config import RunConfig
from comera_rec.training.evaluation import BestSoFar, OneClass, evaluate
from comera_rec.training.log import MetricsLog, Progress, off_target, tell
from comera_rec.training.memory import PeakMemory, keep_freed_memory, return_freed_memory
from comera_rec.training.model import Schema
from comera_rec.training.placement import device_of, name_of, place, whole_model
from comera_rec.training.runs import CHECKPOINTS, fingerprint, load_teacher, require_fit, require_same_run
from comera_rec.training.start import StartingVectors
from comera_rec.training.step import TrainingStep
from comera_rec.training.stopping import Interrupted, StopSignals
from data_pipeline.atomic import locked, write_json
from data_pipeline.errors import UserError
from data_pipeline.manifest import read_manifest

_READERS = 8  # readers of a run's batches, which 1, 2, 4 and 8 processes can share equally
_THREADS = 4  # that read batches for a GPU, which is faster than one of them


class Diverged(Exception):
    """The loss, or a weight, is no longer finite."""

    exit_status = 1


class Trainer:
    """One run, from the config to result.json.

    Where a launcher has started several processes, each builds a Trainer and calls the same methods: tables are sharded by plan,
    the rest is replicated, each process reads different rows, and process 0 writes. The folder must be the same for all.

    Args:
        config: the run; if its folder already holds a part of it, it resumes from the last checkpoint.
        model: the model to start from instead of a new one, on one process only; its sizes are the config's, its ranks may differ.
        after: the `run` and `step` that it starts after, for checkpoints; a run that started after others isn't resumed.

    Raises:
        ValueError: for data that does not fit, or a batch that can't be shared equally.
    """

    def __init__(self, config: RunConfig, model: nn.Module | None = None, *, after: dict[str, Any] | None = None) -> None:
        self.config = config
        self.after = after
        self.folder = Path(config.output)
        self.checkpoints = self.folder / CHECKPOINTS
        self.device = device_of(config.training.device)
        join_launched(self.device)
        keep_freed_memory()
        self.memory = PeakMemory(self.device)
        self.manifest = read_manifest(config.data.path)
        self.schema = Schema.from_manifest(self.manifest)
        require_fit(config, self.schema, self.manifest)
        self.part_size = config.data.batch_size // WORLD.size  # rows of a batch on this process
        self.loader = BatchLoader(
            self._batches("train", shuffle=True), prefetch=config.data.prefetch, pin_memory=self.device.type == "cuda"
        )
        self.total_steps = config.training.steps or max(1, round(config.training.epochs * self.loader.batches.batches_per_epoch()))
        torch.manual_seed(config.seed)
        is_new = model is None and latest_checkpoint(self.checkpoints) is None
        start = StartingVectors(self.manifest, Path(config.data.path)) if is_new and config.tables.start == "vectors" else None
        self.state = place(config, self.schema, model, self.device, self.part_size, start)
        self.model, self.module, self.optimizer = self.state.model, self.state.module, self.state.optimizer
        if self._updates_in_backward():
            update_in_backward_(self.module, self.optimizer)
        self.scheduler = None
        if config.ranks:
            whole = whole_model(config, self.schema, self.module)
            other_bytes = bytes_outside(whole, [module for _, module in named_tt_modules(whole)])
            self.scheduler = RankScheduler(self.module, self.optimizer, config.ranks, other_bytes=other_bytes)
        teacher = load_teacher(config, self.schema, self.device)
        self.step = TrainingStep(
            config, self.state, self.scheduler, device=self.device, total_steps=self.total_steps, teacher=teacher
        )
        self.steps = self.history_written = 0
        self.evaluated = 0  # the step of the last evaluation on the validation split
        self.best = BestSoFar()
        self.undefined = set[str]()  # splits without metrics that have been named
        self.log: MetricsLog | None = None  # on process 0, while it trains
        self.signals = StopSignals()
        self.step_ms: list[float] = []
        self.first_step_ms = float("nan")
        return_freed_memory()

    def _updates_in_backward(self) -> bool:
        """Whether table cores are updated slice by slice: on CPU, unless something needs their whole gradients."""
        ranks = self.config.ranks
        has_tables = any(isinstance(module, TTTable) for module in self.module.modules())
        return has_tables and self.device.type == "cpu" and not (ranks and ranks.beta)

    def _batches(self, split: str, *, shuffle: bool) -> ParquetBatches:
        data, threads = self.config.data, 0 if self.device.type == "cpu" else _THREADS
        settings: dict[str, Any] = {"batch_size": data.eval_batch_size}
        if shuffle:
            readers = math.lcm(WORLD.size, math.gcd(_READERS, self.part_size * WORLD.size))
            settings = {"batch_size": self.part_size, "shuffle": True, "shuffle_rows": data.shuffle_rows, "seed": self.config.seed}
            settings |= {"epochs": None, "drop_last": True, "readers": readers}
        shared: dict[str, Any] = {"process_rank": WORLD.process_rank, "world_size": WORLD.size, "threads": threads}
        batches = ParquetBatches(data.path, split, **shared, **settings)
        if fingerprint(batches.manifest) != fingerprint(self.manifest):  # its ids may mean other values
            raise UserError(f"{data.path} was replaced during the run: put back the data set that was there, or start anew")
        return batches

    # -- state ---------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, and the config beside it."""
        WORLD.on_first(self._write_config)
        record = {
            "step": self.steps,
            "config": self.config.to_dict(),
            "schema": asdict(self.schema),
            "data": fingerprint(self.manifest),
            "after": self.after,
            "evaluated": self.evaluated,
            "best": asdict(self.best),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "batches": self.loader.batches.state_after(self.steps),
        }
        training = self.config.training
        kept_step = self.best.step if training.keep_best else None
        save_checkpoint(
            self.checkpoints, self.steps, record, self.state.tensors(), keep=training.keep_checkpoints, kept_step=kept_step
        )

    def _resume(self) -> None:
        path = WORLD.on_first(lambda: latest_checkpoint(self.checkpoints))
        if path is None:
            return
        checkpoint = open_checkpoint(path)
        record = checkpoint.record
        require_same_run(self.config, self.schema, self.manifest, record, self.after)
        self.after = record.get("after")  # checkpoints of earlier versions lack it
        if record["step"]:  # the first checkpoint of a compressed dense run has seen no batch
            self.loader.load_state_dict(record["batches"])
        self.state.load(checkpoint)
        self.step.model_has_changed()
        if self.scheduler:
            self.scheduler.load_state_dict(record["scheduler"])
            self.history_written = len(self.scheduler.history) - (record["step"] == 0)  # a new run begins with its sizes
        self.steps = record["step"]
        self.evaluated = record["evaluated"]
        best = BestSoFar(**record["best"])
        if best.step is not None and (not self.config.training.keep_best or checkpoint_at(self.checkpoints, best.step)):
            self.best = best

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run's folder against other runs; ValueError on every process if another run is writing it."""
        with contextlib.ExitStack() as held:

            def lock() -> None:
                Path(os.path.realpath(self.folder)).mkdir(parents=True, exist_ok=True)
                try:
                    held.enter_context(locked(self.checkpoints))  # the lock is in the folder, as what is beside may be read-only
                except OSError as error:
                    if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                        raise
                    tell(f"{self.folder} can't be locked ({error.strerror}): start no other run on it meanwhile")

            WORLD.on_first(lock)
            yield

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end, evaluate on the test split, and write result.json.

        Raises:
            Interrupted: after SIGTERM, SIGHUP or SIGINT, with a checkpoint written.
            Diverged: if the loss, or a weight that is to be saved, is not finite; the last good checkpoint stays.
            ValueError: if the folder holds another run, or its last checkpoint is damaged, or another process is writing it.
            OSError: if a checkpoint can't be written.

        Returns:
            The contents of result.json.
        """
        with self.locked():
            return self._train()

    def _train(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        self._resume()
        if WORLD.any(self._unfinished() or not path.exists()):
            WORLD.on_first(self._open_log)
            try:
                with self.signals:
                    self._run()
                    result = self._result()
                WORLD.on_first(lambda: write_json(path, result))
            finally:
                if self.log:
                    self.log.close()
        else:
            WORLD.on_first(lambda: tell(f"{self.folder.name}: finished already, after {self.steps:,} steps"))
        return WORLD.on_first(lambda: dict(json.loads(path.read_text())))

    def _write_config(self) -> None:
        write_json(self.folder / "config.json", self.config.to_dict())

    def _open_log(self) -> None:
        self._write_config()
        (self.folder / "result.json").unlink(missing_ok=True)  # left by a run of fewer steps
        self.log = MetricsLog(self.folder, self.steps, evaluated=self.evaluated == self.steps)

    def _unfinished(self) -> bool:
        return self.steps < self.total_steps and not self._out_of_patience()

    def _out_of_patience(self) -> bool:
        return 0 < self.config.training.patience <= self.best.since

    def _run(self) -> None:
        training = self.config.training
        self._log_ranks()
        if self.steps and self._evaluation_is_due():  # the evaluation was interrupted
            self._validate()
            self.save()
        progress = Progress(self.folder.name, self.steps, self.total_steps, shown=WORLD.is_first)
        losses: list[Tensor] = []
        interval_start = time.perf_counter()
        with progress, contextlib.closing(iter(self.loader)) as batches:
            while self._unfinished():
                losses.append(self._step(batches))
                if math.isnan(self.first_step_ms):
                    losses[0].cpu()  # waits for the device
                    self.first_step_ms = 1e3 * (time.perf_counter() - interval_start)
                progress.update()
                stopping = self.signals.after_step()
                finished = self.steps >= self.total_steps
                saving = bool(stopping or _due(self.steps, training.checkpoint_every)) and not finished
                evaluating = not stopping and self._evaluation_is_due()
                if finished or saving or evaluating or _due(self.steps, training.log_every):
                    progress.observe(self.steps, self._log_losses(losses, interval_start))
                    losses = []
                self._log_ranks()
                if (finished or saving or evaluating) and WORLD.any(not self.state.is_finite()):
                    raise self._diverged(f"weights or their optimizer's state are not finite at step {self.steps}")
                if finished:  # before anything else can go wrong
                    self.save()
                if evaluating:  # before saving, so that a run that resumes from the checkpoint doesn't repeat it
                    best = self._validate()
                    saving = saving or self._out_of_patience() or (best and training.keep_best)
                if saving:
                    self.save()
                if stopping:
                    raise Interrupted(stopping, self.steps)
                if not losses:
                    interval_start = time.perf_counter()

    def _step(self, batches: Iterator[Batch]) -> Tensor:
        """Take one optimizer step; return the task loss, which stays on the device."""
        loss = self.step(self.steps + 1, batches)
        self.steps += 1
        return loss

    def _diverged(self, problem: str) -> Diverged:
        kept = latest_checkpoint(self.checkpoints)
        last = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"
        return Diverged(f"{problem}: lower the learning rates; {last}")

    def _log_losses(self, losses: list[Tensor], interval_start: float) -> float:
        """Log the mean loss of the last steps, and return it; raise Diverged if one is not finite."""
        means = WORLD.mean(torch.stack(losses)).cpu()
        if bad := (~means.isfinite()).nonzero().flatten().tolist():
            raise self._diverged(f"the loss is {float(means[bad[0]])} at step {self.steps - len(losses) + bad[0] + 1}")
        # Reading the losses has waited for the device, so this is the time of whole steps on a GPU too.
        self.step_ms.append(1e3 * (time.perf_counter() - interval_start) / len(losses))
        loss, memory, rows = float(means.mean()), self.memory.take(), self.steps * self.config.data.batch_size
        self._log("train", loss=loss, step_ms=self.step_ms[-1], memory_mib=memory, rows=rows)
        return loss

    def _log_ranks(self) -> None:
        if self.scheduler:
            earlier = self.scheduler.steps - self.steps  # of the run that this one continues
            for entry in self.scheduler.history[self.history_written :]:
                values = {key: value for key, value in entry.items() if key != "loss"}
                self._log("ranks", **values | {"step": max(0, entry["step"] - earlier)})
            self.history_written = len(self.scheduler.history)

    def _log(self, kind: str, **values: Any) -> None:
        if self.log:
            self.log.write(kind, **{"step": self.steps} | values)

    def _rows(self, split: str) -> int:
        return self.manifest.splits[split].rows

    def _evaluation_is_due(self) -> bool:
        due = _due(self.steps, self.config.training.eval_every) or self.steps >= self.total_steps
        return due and self.evaluated != self.steps and self._rows("val") > 0

    def _validate(self) -> bool:
        """Evaluate on the validation split; return whether the model is the best so far among those of the final size."""
        try:
            metrics = self._evaluate("val")
        except Interrupted:
            self.save()
            raise
        self._log("eval", split="val", **metrics)
        self.evaluated = self.steps
        counts = self.scheduler is None or self.scheduler.stage == "done"
        return counts and metrics["ne"] is not None and self.best.observe(self.steps, metrics["ne"])

    def _evaluate(self, split: str) -> dict[str, Any]:
        def stop_if_asked() -> None:
            if stopping := int(WORLD.max(self.signals.received)):
                raise Interrupted(stopping, self.steps)

        try:
            metrics = evaluate(self.model, self._batches(split, shuffle=False), self.device, between=stop_if_asked)
        except OneClass as error:  # no reason to end a run
            if WORLD.is_first and split not in self.undefined:
                tell(f"{self.folder.name}: {split} has no metrics: {error}")
            self.undefined.add(split)
            metrics = {"auc": None, "ne": None, "logloss": None, "rows": self._rows(split)}
        return metrics

    def _result(self) -> dict[str, Any]:
        peak = WORLD.max(self.memory.highest)
        if self.scheduler and WORLD.is_first and (problem := off_target(self.scheduler)):
            tell(problem)
        best = self.best.step if self.config.training.keep_best else None
        if best not in (None, self.steps):
            kept = WORLD.on_first(lambda: checkpoint_at(self.checkpoints, best))
            assert kept is not None
            self.state.load(open_checkpoint(kept))
            self.step.model_has_changed()
        split = next(name for name in ("test", "val", "train") if self._rows(name))
        metrics = self._evaluate(split)
        if split != "val":  # that has a line, of the last weights
            self._log("eval", split=split, **metrics)
        whole = whole_model(self.config, self.schema, self.module)
        step_ms = statistics.median(self.step_ms) if self.step_ms else None
        return {
            "name": self.folder.name,
            "steps": self.steps,
            "best_step": best,
            "split": split,
            **metrics,
            "step_ms": step_ms,
            "first_step_ms": None if math.isnan(self.first_step_ms) else self.first_step_ms,
            "rows_per_s": step_ms and 1e3 * self.config.data.batch_size / step_ms,
            "peak_mib": peak,
            **compression_report(whole).to_dict(),
            "processes": WORLD.size,
            "seed": self.config.seed,
            "device": name_of(self.device),
            "versions": {name: version(name) for name in ("comera-rec", "torch", "torchrec")}
            | {"python": platform.python_version()},
            "data_rows": self.manifest.rows.written,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
