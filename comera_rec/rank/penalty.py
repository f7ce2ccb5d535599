"""Differentiable size of a model's TT modules, so that training can weigh it against the loss.

r_k rank of bond k; m_k, n_k modes of core k.
"""

import math
from collections.abc import Iterable
from functools import lru_cache, reduce

import torch
from torch import Tensor

from comera_rec.nn import TTModule


def size_surrogate(modules: Iterable[TTModule]) -> Tensor:
    """Return the parameter count of TT modules with ||D_k||_1 in place of every rank r_k; the two are equal while every |D| is 1.

    S^(D) = sum_k r^_{k-1} m_k n_k r^_k + sum_k r^_k with r^_k = ||D_k||_1 and r^_0 = r^_d = 1: a rank is priced by the parameters
    it costs, in both modes. CoMERA, section 3.2 (arXiv 2405.14377).
    """
    # All bonds of all modules in a few operations, because a model has hundreds of bonds and each operation takes time.
    modules = [module for module in modules if module.shape.num_params]
    ranks: list[Tensor] = [rank for module in modules for rank in module.rank_parameters()]
    outer = len(ranks)  # index of the outer rank, 1, after those of all bonds
    left, right, sizes, bond = [], [], [], 0
    for module in modules:
        inner = list(range(bond, bond + module.shape.order - 1))
        bond += len(inner)
        left += [outer, *inner]
        right += [*inner, outer]
        shape = module.whole_shape
        sizes += [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
    if not modules:
        return torch.zeros(())
    device, dtype = modules[0].core_0.device, _at_least_32_bits(module.core_0 for module in modules)
    bond_of, left_of, right_of, weights = _indices(tuple(map(len, ranks)), tuple(left), tuple(right), tuple(sizes), device, dtype)
    norms = torch.zeros(outer, device=device, dtype=dtype)
    if ranks:
        norms = norms.index_add(0, bond_of, torch.cat(ranks).flatten().to(dtype).abs())
    bonds = torch.cat([norms, norms.new_ones(1)])
    return (bonds[left_of] * bonds[right_of] * weights).sum() + norms.sum()


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is cached has to serve training, too
def _indices(
    ranks: tuple[int, ...],
    left: tuple[int, ...],
    right: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the bond of each entry of the rank parameters, and each core's left bond, right bond and size.

    Cached, because copying to a GPU blocks the host.
    """
    bond_of = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks, dtype=torch.int64))
    indices = bond_of, torch.tensor(left), torch.tensor(right), torch.tensor(sizes, dtype=dtype)
    return tuple(index.to(device) for index in indices)


def core_norm(modules: Iterable[TTModule], num_cores: int | None = None) -> Tensor:
    """Return the mean over cores of their mean square entry: a penalty on growing cores while rank parameters shrink.

    Args:
        modules: TT modules of this process.
        num_cores: cores of all processes' modules; default the non-empty ones here.
    """
    modules = list(modules)
    dtype = _at_least_32_bits(module.core_0 for module in modules)
    terms = [
        core.to(dtype).square().sum() / math.prod(size)
        for module in modules
        for core, size in zip(module.cores(), module.whole_shape.core_shapes, strict=True)
        if core.numel()
    ]
    return torch.stack(terms).sum() / (num_cores or len(terms)) if terms else torch.zeros(())


def _at_least_32_bits(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the type in which tensors are summed: sizes exceed what 16-bit floats hold."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
