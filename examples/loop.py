"""What examples share: the form of their layers, the training loop, and the record of a run."""

from __future__ import annotations

import dataclasses
import json
import os
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
from comera_rec.nn import EMBEDDING_STD, dense_embedding
from comera_rec.training.config import LinearsConfig

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """How the token embedding is held.

    Attributes:
        format: "tt" or "dense".
        tt_ranks: ranks, one for all bonds or one each.
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
        lr_cores: of TT cores.
        lr_ranks: of the rank parameters, which start at 1.
        weight_decay: of AdamW.
        warmup: part of the steps in which the learning rates rise.
        clip: largest norm of the gradient.
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
                raise ValueError(f"training.{name} is {getattr(self, name)}: give a positive number")


def build_encoder(config: cr.TransformerConfig, tokens: EmbeddingSettings, linears: LinearsConfig) -> cr.TransformerEncoder:
    """An encoder in the form that the settings ask for, dense or TT."""
    return cr.TransformerEncoder(config, linear=linear_layers(linears), embedding=_embeddings(tokens))


def linear_layers(linears: LinearsConfig) -> Callable[[int, int], nn.Module]:
    """What makes the linear layers."""
    return nn.Linear if linears.format == "dense" else cr.linear_factory(linears)


def _embeddings(tokens: EmbeddingSettings) -> Callable[[int, int], nn.Module]:
    if tokens.format == "dense":
        return dense_embedding
    if tokens.row_shape and tokens.col_shape:
        return partial(cr.TTEmbedding, shape=cr.TTShape(tokens.row_shape, tokens.col_shape, tokens.tt_ranks), std=EMBEDDING_STD)
    return partial(cr.TTEmbedding, tt_ranks=tokens.tt_ranks, std=EMBEDDING_STD)


def adamw(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW over cores, rank parameters and all other parameters, at their own learning rates."""
    groups = cr.rank_param_groups(model, lr_cores=settings.lr_cores, lr_ranks=settings.lr_ranks, lr_dense=settings.lr_dense)
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay, fused=True)
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["name"] != "ranks"  # what ranks cost is the schedule's business
    return optimizer


def fit(
    model: nn.Module,
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], Tensor],
    settings: TrainingSettings,
    ranks: cr.RankConfig | None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Train, and adapt ranks if asked to.

    Args:
        model: trained in place.
        batches: as many as there are steps, or more.
        loss_of: the task's loss on a batch.
        settings: how long and how fast.
        ranks: the rank schedule; None keeps the ranks as they start.
        optimizer: of the model's parameters; None is `adamw`.

    Raises:
        ValueError: if the loss is no longer finite.

    Returns:
        What happened: seconds of all steps by the clock and of all threads together, milliseconds per step, their median in each
        stage of the schedule, the mean loss of the last tenth, and the schedule's history.
    """
    optimizer = optimizer or adamw(model, settings)
    rise = max(1, round(settings.warmup * settings.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (settings.steps - step) / max(1, settings.steps - rise))
    )
    scheduler = None if ranks is None else cr.RankScheduler(model, optimizer, ranks)
    losses, milliseconds = [], defaultdict(list)
    model.train()
    cpu = time.process_time()
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
            raise ValueError(f"the loss is {losses[-1]} in step {step}: lower training.lr_cores and training.lr_dense")
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}")
    model.eval()
    cpu = time.process_time() - cpu
    of_all = np.concatenate(list(milliseconds.values()))
    return {
        "train_loss": float(np.mean(losses[-max(1, settings.steps // 10) :])),
        "seconds": float(of_all.sum() / 1000),
        "cpu_seconds": cpu,
        "step_ms": dict(zip(("p20", "p50", "p80"), np.percentile(of_all, [20, 50, 80]).tolist(), strict=True)),
        "stage_ms": {stage: float(np.median(times)) for stage, times in milliseconds.items()},
        "rank_history": [] if scheduler is None else scheduler.history,
    }


def sizes(model: nn.Module) -> dict[str, Any]:
    """Parameters and bytes, beside those of the dense model."""
    report = cr.compression_report(model)
    return {**{name: report.total(name) for name in ("params", "dense_params", "bytes", "dense_bytes")}, "ratio": report.ratio}


def new_folder(output: str) -> Path:
    """The folder of a run that is not finished yet.

    Raises:
        ValueError: if it holds a finished one.
    """
    folder = Path(output)
    if (folder / "metrics.json").exists():
        raise ValueError(f"output {folder} holds a finished run: give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(folder: Path, model: nn.Module, metrics: dict[str, Any], settings: Any) -> None:
    """Keep the weights and, last, metrics.json, which says that the run is finished."""
    torch.save(model.state_dict(), folder / "model.pt")
    partial_file = folder / "metrics.json.partial"
    partial_file.write_text(json.dumps({**metrics, "settings": dataclasses.asdict(settings)}, indent=2) + "\n")
    os.replace(partial_file, folder / "metrics.json")
