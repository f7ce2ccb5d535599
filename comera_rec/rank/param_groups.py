"""Optimizer parameter groups: cores, rank parameters and everything dense."""

from __future__ import annotations

from typing import Any

from torch import nn

from comera_rec.nn import named_tt_modules
from data_pipeline.errors import UserError


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
