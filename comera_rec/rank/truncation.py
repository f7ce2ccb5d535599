"""Physical truncation: small ranks are sliced out of cores, rank parameters, gradients and optimizer state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn import TTModule, named_tt_modules, replace_data_


def count_tt_params(model: nn.Module) -> int:
    """S(D): numbers stored in all tensor trains of a model, biases not counted."""
    return sum(module.shape.num_params for _, module in named_tt_modules(model))


def truncate_ranks_(
    model: nn.Module, optimizer: Optimizer | None = None, *, threshold: float, min_params: int = 0
) -> dict[str, tuple[int, ...]]:
    """Remove every rank whose |D| is below a threshold, so that later steps are smaller and faster.

    Parameters keep their identity and names; an optimizer's state of the same shape (momenta, second moments, Adagrad sums) is
    sliced alike. A layer whose bond loses all its ranks is then zero (plus its bias). Under DistributedDataParallel wrap the model
    anew afterwards, because its hooks sit on the old gradients.

    Args:
        model: any module that holds tensor-train modules.
        optimizer: the optimizer over the model's parameters, if it has one.
        threshold: ranks with |D| below it go; infinity offers all of them, for use with `min_params`.
        min_params: stop before the trains together would hold fewer parameters than this; the smallest |D| go first.

    Raises:
        ValueError: for a negative threshold.

    Returns:
        The ranks of every tensor-train module after truncation, by fully qualified name.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}: give a non-negative number")
    modules = dict(named_tt_modules(model))
    keep = _choose(list(modules.values()), threshold, min_params)
    for module, masks in zip(modules.values(), keep, strict=True):
        if not all(bool(mask.all()) for mask in masks):
            _slice_module_(module, masks, optimizer)
    return {name: module.shape.ranks for name, module in modules.items()}


def _choose(modules: list[TTModule], threshold: float, min_params: int) -> list[list[Tensor]]:
    """Per module and bond a boolean mask of the ranks to keep."""
    keep = [[torch.ones(len(rank), dtype=torch.bool) for rank in module.rank_parameters()] for module in modules]
    candidates = []
    for i, module in enumerate(modules):
        for k, rank in enumerate(module.rank_parameters()):
            magnitudes = rank.detach().abs().double().tolist()
            candidates += [(size, i, k, j) for j, size in enumerate(magnitudes) if size < threshold]
    shapes = [module.shape for module in modules]
    total = sum(shape.num_params for shape in shapes)
    for _, i, k, j in sorted(candidates):
        ranks = list(shapes[i].ranks)
        if ranks[k] == 0:  # the train is gone already
            continue
        ranks[k] -= 1
        smaller = shapes[i].with_ranks(ranks)
        if total - shapes[i].num_params + smaller.num_params < min_params:
            continue
        total += smaller.num_params - shapes[i].num_params
        shapes[i] = smaller
        keep[i][k][j] = False
        if ranks[k] == 0:
            for mask in keep[i]:
                mask.fill_(False)
    return keep


def _slice_module_(module: TTModule, masks: list[Tensor], optimizer: Optimizer | None) -> None:
    device = module.core_0.device
    kept = [mask.nonzero().flatten().to(device) for mask in masks]
    before = [None, *kept]
    after = [*kept, None]
    for core, first, last in zip(module.cores(), before, after, strict=True):
        _slice_parameter_(core, {0: first, 3: last}, optimizer)
    for rank, index in zip(module.rank_parameters(), kept, strict=True):
        _slice_parameter_(rank, {0: index}, optimizer)
    module.shape = module.shape.with_ranks([len(index) for index in kept])


def _slice_parameter_(parameter: nn.Parameter, indices: dict[int, Tensor | None], optimizer: Optimizer | None) -> None:
    """Keep some indices of a parameter, of its gradient and of every optimizer state tensor of its shape."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, index in indices.items():
            if index is not None:
                tensor = tensor.index_select(dim, index)
        return tensor

    if optimizer is not None and parameter in optimizer.state:
        state = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = cut(value)
    gradient = parameter.grad
    replace_data_(parameter, cut(parameter.data))
    if gradient is not None:
        parameter.grad = cut(gradient)
