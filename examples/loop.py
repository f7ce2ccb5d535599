"""Code that the examples share: building layers, the training loop, and saving a run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import comera_rec as cr
from comera_rec.nn import EMBEDDING_STD, TransformerConfig, TransformerEncoder, dense_embedding
from comera_rec.rank import rank_param_groups
from comera_rec.training.config import LinearsConfig
from comera_rec.training.log import off_target
from data_pipeline.errors import UserError

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """How the token embedding is stored.

    Attributes:
        format: "tt" or "dense".
        tt_ranks: TT ranks, one for all bonds or one for each.
        row_shape, col_shape: modes; default those of `TTShape.for_table`.
    """

    format: Literal["tt", "dense"] = "tt"
    tt_ranks: int | tuple[int, ...] = 32
    row_shape: tuple[int, ...] | None = None
    col_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """AdamW with linear warm-up and decay.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences in a batch.
        lr_dense: peak learning rate of dense weights, biases and norms.
        lr_cores: peak learning rate of TT cores.
        lr_ranks: peak learning rate of the rank parameters, which start at 1.
        weight_decay: AdamW's weight decay.
        warmup: fraction of the steps in which the learning rates rise.
        clip: norm to which larger gradients are clipped.
    """

    steps: int
    batch_size: int = 32
    lr_dense: float = 5e-4
    lr_cores: float = 2e-3
    lr_ranks: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"training.{name} is {getattr(self, name)}: give a positive number")


def build_encoder(config: TransformerConfig, tokens: EmbeddingSettings) -> TransformerEncoder:
    """Build an encoder with dense layers, over a token embedding in the form that the settings ask for."""
    return TransformerEncoder(config, embedding=_embeddings(tokens))


def compress_layers_(model: nn.Module, linears: LinearsConfig) -> None:
    """Compress a model's linear layers, if the settings ask for it."""
    if linears.format == "tt":
        cr.compress_(model, linears=linears)


def _embeddings(tokens: EmbeddingSettings) -> Callable[[int, int], nn.Embedding | cr.TTEmbedding]:
    if tokens.format == "dense":
        return dense_embedding
    if bool(tokens.row_shape) != bool(tokens.col_shape):
        raise UserError("tokens has one of row_shape and col_shape: give both, or none")
    if tokens.row_shape and tokens.col_shape:
        return partial(cr.TTEmbedding, shape=cr.TTShape(tokens.row_shape, tokens.col_shape, tokens.tt_ranks), std=EMBEDDING_STD)
    return partial(cr.TTEmbedding, tt_ranks=tokens.tt_ranks, std=EMBEDDING_STD)


def adamw(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW over cores, rank parameters and all other parameters, at their own learning rates."""
    groups = rank_param_groups(model, lr_cores=settings.lr_cores, lr_ranks=settings.lr_ranks, lr_dense=settings.lr_dense)
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay, fused=True)
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["name"] != "ranks"  # the rank schedule alone penalizes rank parameters
    return optimizer


def fit(
    model: nn.Module,
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], Tensor],
    settings: TrainingSettings,
    ranks: cr.RankConfig | None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Train a model, and adapt its ranks if there is a rank schedule.

    Args:
        model: trained in place.
        batches: at least one for each step.
        loss_of: the task's loss on a batch.
        settings: number of steps and learning rates.
        ranks: the rank schedule; None keeps the initial ranks.
        optimizer: of the model's parameters; None is `adamw`.

    Raises:
        ValueError: if the loss becomes infinite or NaN.

    Returns:
        The run's record: wall-clock seconds and CPU seconds of all steps, milliseconds per step, their median in each stage of the
        schedule, the mean loss of the last tenth of the steps, and the schedule's history.
    """
    optimizer = optimizer or adamw(model, settings)
    warmup_steps = max(1, round(settings.warmup * settings.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup_steps, (settings.steps - step) / max(1, settings.steps - warmup_steps))
    )
    scheduler = None if ranks is None else cr.RankScheduler(model, optimizer, ranks)
    losses, milliseconds = [], defaultdict(list)
    model.train()
    cpu_seconds = time.process_time()
    for step in (progress := tqdm(range(settings.steps), unit="step", disable=None)):
        batch = next(batches)
        start = time.perf_counter()
        task_loss = loss_of(batch)
        optimizer.zero_grad()
        (task_loss if scheduler is None else scheduler.loss(task_loss)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(task_loss.item())
        milliseconds[scheduler.stage if scheduler else "fixed"].append(1000 * (time.perf_counter() - start))
        if not np.isfinite(losses[-1]):
            raise UserError(f"the loss is {losses[-1]} at step {step}: lower training.lr_cores and training.lr_dense")
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}")
    model.eval()
    if scheduler is not None and (reason := off_target(scheduler)):
        tqdm.write(reason, file=sys.stderr)
    cpu_seconds = time.process_time() - cpu_seconds
    step_ms = np.concatenate(list(milliseconds.values()))
    return {
        "train_loss": float(np.mean(losses[-max(1, settings.steps // 10) :])),
        "seconds": float(step_ms.sum() / 1000),
        "cpu_seconds": cpu_seconds,
        "step_ms": dict(zip(("p20", "p50", "p80"), np.percentile(step_ms, [20, 50, 80]).tolist(), strict=True)),
        "stage_ms": {stage: float(np.median(times)) for stage, times in milliseconds.items()},
        "rank_history": [] if scheduler is None else scheduler.history,
    }


def sizes(model: nn.Module) -> dict[str, Any]:
    """Parameters and bytes of a model and of its dense form."""
    report = cr.compression_report(model)
    return {**{name: report.total(name) for name in ("params", "dense_params", "bytes", "dense_bytes")}, "ratio": report.ratio}


def new_folder(output: str) -> Path:
    """Create the folder of a new or unfinished run.

    Raises:
        ValueError: if it holds a finished run.
    """
    folder = Path(output)
    if (folder / "metrics.json").exists():
        raise UserError(f"output {folder} holds a finished run: name another folder, or remove this one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(folder: Path, model: nn.Module, metrics: dict[str, Any], settings: Any) -> None:
    """Save the weights and, last, metrics.json, which marks the run as finished."""
    torch.save(model.state_dict(), folder / "model.pt")
    partial_file = folder / "metrics.json.partial"
    partial_file.write_text(json.dumps({**metrics, "settings": dataclasses.asdict(settings)}, indent=2) + "\n")
    os.replace(partial_file, folder / "metrics.json")
