"""Summaries of all TT modules of a model, which may be spread over several processes.

Under `DistributedModelParallel` a process has whole tables, shards of tables and replicas. Decisions about ranks need all of them,
and the same view on every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera_rec.nn import TTModule, named_tt_modules
from comera_rec.tt import TTShape

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ModuleSummary:
    """What a decision about the ranks of a TT module needs.

    Attributes:
        shape: modes and ranks of the whole module, also where it is sharded.
        dense_params: parameters of the dense module that it replaces.
        unit: bytes of a parameter.
        scores: the score of each rank, [r_k] per bond; empty where no scores are needed.
    """

    shape: TTShape
    dense_params: int
    unit: int
    scores: tuple[Tensor, ...] = ()


def gather_tt_modules(
    modules: Mapping[str, TTModule], scores: Mapping[str, Sequence[Tensor]] | None = None
) -> dict[str, ModuleSummary]:
    """Summarize every TT module of a model, by name; every process must call this, and all get the same.

    Args:
        modules: the TT modules of this process, by name.
        scores: the score of each rank, per module of this process and bond.
    """
    return gather(
        {
            name: ModuleSummary(
                shape=module.whole_shape,
                dense_params=module.dense_params,
                unit=module.core_0.element_size(),
                scores=tuple(score.cpu() for score in scores[name]) if scores else (),
            )
            for name, module in modules.items()
        }
    )


def bytes_outside_tt_modules(model: nn.Module) -> int:
    """Count the bytes of a model's parameters outside its TT modules."""
    in_tt_modules = {id(p) for _, module in named_tt_modules(model) for p in (*module.cores(), *module.rank_parameters())}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in in_tt_modules)


def gather(mine: dict[str, Value]) -> dict[str, Value]:
    """The entries of all processes; of those that several have, the first process's."""
    if not on_several_processes():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for entries in reversed(everyone) for name, value in entries.items()}


def count_processes(mine: Mapping[str, object]) -> dict[str, int]:
    """How many processes have an entry of each name that this one has."""
    if not on_several_processes():
        return dict.fromkeys(mine, 1)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    return {name: sum(name in names for names in everyone) for name in mine}


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of every process's value, without gradient."""
    mean = value.detach().clone()
    if on_several_processes():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


def max_over_processes(value: float) -> float:
    """The largest of every process's values."""
    if not on_several_processes():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def on_several_processes() -> bool:
    """Whether a process group of more than one exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def total_params(summaries: Mapping[str, ModuleSummary]) -> int:
    """Count the parameters of all TT modules."""
    return sum(summary.shape.num_params for summary in summaries.values())


def total_bytes(summaries: Mapping[str, ModuleSummary]) -> int:
    """Count the bytes of all TT modules."""
    return sum(summary.unit * summary.shape.num_params for summary in summaries.values())
