"""Differentiable size of a model: what a rank costs, so that training can weigh it against the loss.

r_k rank of bond k; m_k, n_k modes of core k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comera_rec.nn import TTModule, named_tt_modules


def size_surrogate(module: TTModule) -> Tensor:
    """The parameter count with ||D_k||_1 in place of every rank r_k; equal to it while every |D| is 1.

    S^(D) = sum_k r^_{k-1} m_k n_k r^_k + sum_k r^_k with r^_k = ||D_k||_1 and r^_0 = r^_d = 1: a rank is priced by the
    parameters it costs, in both modes. CoMERA, section 3.2 (arXiv 2405.14377).
    """
    norms = [rank.abs().sum() for rank in module.rank_parameters()]
    one = torch.ones((), device=module.core_0.device, dtype=module.core_0.dtype)
    bonds = [one, *norms, one]
    sizes = [m * n for m, n in zip(module.shape.row_shape, module.shape.col_shape, strict=True)]
    terms = [left * right * size for left, right, size in zip(bonds[:-1], bonds[1:], sizes, strict=True)]
    return torch.stack(terms + norms).sum()


def model_size_surrogate(model: nn.Module) -> Tensor:
    """Sum of `size_surrogate` over the trains of a model that still hold anything."""
    terms = [size_surrogate(module) for _, module in named_tt_modules(model) if module.shape.num_params]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def core_norm(model: nn.Module) -> Tensor:
    """Mean over all cores of the mean square entry: keeps scale from hiding in the cores while the rank parameters shrink."""
    terms = [core.square().mean() for _, module in named_tt_modules(model) for core in module.cores() if core.numel()]
    return torch.stack(terms).mean() if terms else torch.zeros(())
