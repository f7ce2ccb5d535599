"""A model's parameters in groups, and summaries of its TT modules, which may be spread over several processes.

Under `DistributedModelParallel` a process has whole tables, shards of tables and replicas. Decisions about ranks need all of them,
and the same view on every process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera_rec.distributed import WORLD
from comera_rec.nn import TTLinear, TTModule, TTTable, named_tt_modules
from comera_rec.tt import TTShape
from data_pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModuleSummary:
    """The facts about a TT module on which decisions about its ranks depend.

    Attributes:
        shape: modes and ranks of the whole module, also where it is sharded.
        dense_params: parameters of the dense module that it replaces.
        unit: bytes of a parameter.
        order_bytes: bytes of a table's row order, which stay.
        scores: the score of each rank, [r_k] per bond; empty where no scores are needed.
        has_hot_rows: whether it is a table with hot rows. They share its scores, although many ids use only its cores.
        least_rank: ranks that every bond keeps: 1 in a linear layer, which lets nothing through without any.
    """

    shape: TTShape
    dense_params: int
    unit: int
    order_bytes: int = 0
    scores: tuple[Tensor, ...] = ()
    has_hot_rows: bool = False
    least_rank: int = 0

    @property
    def least_params(self) -> int:
        """Parameters at the least ranks."""
        return self.shape.with_ranks([min(self.least_rank, rank) for rank in self.shape.ranks]).num_params


def gather_tt_modules(
    modules: Mapping[str, TTModule],
    scores: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, ModuleSummary]:
    """Summarize every TT module of a model, by name; every process must call this, and all get the same.

    Args:
        modules: the TT modules of this process, by name.
        scores: the score of each rank, per module of this process and bond.
    """
    return WORLD.merge(
        {
            name: ModuleSummary(
                shape=module.whole_shape,
                dense_params=module.dense_params,
                unit=module.core_0.element_size(),
                order_bytes=0 if (order := getattr(module, "row_order", None)) is None else order.nbytes,
                scores=tuple(score.cpu() for score in scores[name]) if scores else (),
                has_hot_rows=isinstance(module, TTTable) and module.num_hot_rows > 0,
                least_rank=int(isinstance(module, TTLinear)),
            )
            for name, module in modules.items()
        }
    )


def bytes_outside(model: nn.Module, modules: Iterable[TTModule]) -> int:
    """Count the bytes of a model's parameters outside the given TT modules."""
    in_tt_modules = {id(p) for module in modules for p in (*module.cores(), *module.rank_parameters())}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in in_tt_modules)


def total_params(summaries: Mapping[str, ModuleSummary]) -> int:
    """Count the parameters of all TT modules."""
    return sum(summary.shape.num_params for summary in summaries.values())


def total_bytes(summaries: Mapping[str, ModuleSummary]) -> int:
    """Count the bytes of all TT modules."""
    return sum(summary.unit * summary.shape.num_params for summary in summaries.values())


def _is_free(parameter: nn.Parameter) -> bool:
    # torch sets this attribute on parameters that are updated in backward, which leaves no gradient for another optimizer.
    return parameter.requires_grad and not hasattr(parameter, "_in_backward_optimizers")


def rank_param_groups(model: nn.Module, *, lr_cores: float, lr_ranks: float, lr_dense: float) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups with separate learning rates.

    Args:
        model: any module. Parameters that TorchRec updates in the backward pass (fused tables) are left out.
        lr_cores, lr_ranks, lr_dense: learning rates of the cores, the rank parameters D_k, and all other parameters.

    Raises:
        ValueError: for a negative learning rate.

    Returns:
        Groups for a torch optimizer, each with "name", "lr" and "params"; empty groups are left out.
    """
    for name, rate in (("lr_cores", lr_cores), ("lr_ranks", lr_ranks), ("lr_dense", lr_dense)):
        if not rate >= 0:
            raise UserError(f"{name} is {rate}: give a non-negative learning rate")
    cores = [core for _, module in named_tt_modules(model) for core in module.cores()]
    ranks = [rank for _, module in named_tt_modules(model) for rank in module.rank_parameters()]
    tt_parameters = {id(parameter) for parameter in (*cores, *ranks)}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tt_parameters]
    groups = [("cores", lr_cores, cores), ("ranks", lr_ranks, ranks), ("dense", lr_dense, dense)]
    trainable = [(name, rate, [p for p in parameters if _is_free(p)]) for name, rate, parameters in groups]
    return [{"name": name, "lr": rate, "params": parameters} for name, rate, parameters in trainable if parameters]
