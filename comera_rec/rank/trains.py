"""The tensor trains of a whole model, also where it is spread over several processes.

Under `DistributedModelParallel` a process holds some tables whole, a part of others, and replicas of the rest. What decides about
ranks has to see all of them, and the same on every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from comera_rec.distributed import WORLD, Processes
from comera_rec.nn import TTModule, named_tt_modules
from comera_rec.tt import TTShape


@dataclass(frozen=True, kw_only=True)
class Train:
    """What decisions about a train need to know of it.

    Attributes:
        shape: of the whole train.
        dense_params: numbers of the dense matrix it stands for.
        unit: bytes of a number.
        scores: the value of each rank, [r_k] per bond; empty where nobody asked.
    """

    shape: TTShape
    dense_params: int
    unit: int
    scores: tuple[Tensor, ...] = ()


def gather_trains(
    modules: Mapping[str, TTModule],
    scores: Mapping[str, Sequence[Tensor]] | None = None,
    processes: Processes = WORLD,
) -> dict[str, Train]:
    """What decisions need of every TT module of a model; where there are several processes, each calls this and gets the same.

    Args:
        modules: those of this process, by name.
        scores: the value of each rank, per train and bond, of the trains of this process.
        processes: among which the model is spread.
    """
    return processes.merge(
        {
            name: Train(
                shape=module.whole_shape,
                dense_params=module.dense_params,
                unit=module.core_0.element_size(),
                scores=tuple(score.cpu() for score in scores[name]) if scores else (),
            )
            for name, module in modules.items()
        }
    )


def bytes_outside_trains(model: nn.Module) -> int:
    """Bytes of a model's parameters that belong to no train."""
    trains = {id(p) for _, module in named_tt_modules(model) for p in (*module.cores(), *module.rank_parameters())}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in trains)


def total_params(trains: Mapping[str, Train]) -> int:
    """Numbers stored in all trains."""
    return sum(train.shape.num_params for train in trains.values())


def total_bytes(trains: Mapping[str, Train]) -> int:
    """Bytes of all trains."""
    return sum(train.unit * train.shape.num_params for train in trains.values())
